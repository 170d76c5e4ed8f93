"""The `triton` artifact, a Triton model repository, and the stage `package_triton`."""

from __future__ import annotations

import logging
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.artifacts.artifact import Artifact
from compress.common.config import Count
from compress.common.errors import StageFailed
from compress.common.forward import opened_model
from compress.common.signature import TABLE_ROWS
from compress.core.gates import AnyGate, LabelAgreement, Parity
from compress.core.stage import Stage
from compress.export.aotinductor.stage import AotModel
from compress.export.onnx.stage import OnnxModel
from compress.export.openvino.stage import OpenVINOModel
from compress.export.torchscript.stage import TorchScriptModel
from compress.serve.repository.triton import CONFIG, VERSION, refuse_foreign_entries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from compress.common.forward import Predictor
    from compress.core.context import Context

logger = logging.getLogger(__name__)

NOT_RUN = (
    "Triton itself was not run: the gates judged the packaged file with the runtime of this "
    "process; config.pbtxt is written for Triton's published schema"
)


AUTO_COMPLETES = (
    "start Triton with --disable-auto-complete-config: otherwise it adds dynamic batching, and "
    "joins requests all the same"
)
MAY_BE_BFLOAT16 = (
    "Triton's OpenVINO backend computes in bfloat16 on processors that have it, and has no setting "
    "for float32, by which the gates judged"
)
NO_AOT_BATCHING = (
    "Triton's PyTorch backend does not batch AOTInductor packages; a client may send many rows in "
    "one request"
)


class TritonRepository(Artifact):
    """A model repository: ``<name>/config.pbtxt`` and ``<name>/1/`` with the model.

    ``open`` runs the model file in this process. Triton ignores the artifact's manifest beside the
    model's folder, because it is no folder.
    """

    kind: ClassVar[str] = "triton"
    payload: ClassVar[str] = CONFIG

    @property
    def model_name(self) -> str:
        """Name under which Triton serves the model."""
        return str(self.fact("model_name"))

    @property
    def payload_name(self) -> str:
        """The model's file in its version folder."""
        return str(self.manifest.facts.get("model_file", self.payload))

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the whole repository."""
        return sum(file.bytes for file in self.manifest.files.values())

    def check_files(self, hashed: Iterable[str] = ()) -> None:
        """Check as every artifact's files are, and the entries of the configuration."""
        super().check_files(hashed)
        refuse_foreign_entries(self.path, self.manifest.files, self.model_name)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Yield a predictor of the packaged file; Triton is not started."""
        self.verify_cached()
        with open_predictor(self, self.payload_path, device, threads) as predict:
            yield predict


Servable = OnnxModel | TorchScriptModel | AotModel | OpenVINOModel


class PackageTriton(Stage[Servable, TritonRepository]):
    """Lay a model out as a repository of Triton's, with a configuration from its signature."""

    stage: Literal["package_triton"] = "package_triton"
    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "model"
    """Name under which it is served, and of its folder: `/v2/models/<model_name>/infer`."""
    max_batch_size: Count = 128
    """Rows that Triton gives the model at once, where axis 0 of every tensor counts them; other
    models are served with all their dimensions written and no batching."""
    dynamic_batching: bool = True
    """Whether Triton may join waiting requests; left out, with a warning, unless rows of `val` have
    shown that they do not change each other's answers."""
    max_batch_delay_ms: Annotated[float, Field(ge=0)] = 0.0
    """How long a request waits to be joined by others, in milliseconds."""
    queue_size: Count = 128
    """Requests that may wait; Triton refuses those above."""
    instances: Count = 1
    """Copies of the model that answer at once; instances x threads should not exceed the cores."""
    threads: Count = 1
    """CPU threads of each copy."""
    gates: tuple[AnyGate, ...] = (LabelAgreement(minimum=1.0), Parity(atol=1e-4))
    """Rules that the packaged file must satisfy; by default it answers as its input does."""

    @property
    def uses_data(self) -> bool:
        """Whether requests may be batched is measured on rows of `val`."""
        return True

    def run(self, model: Servable, context: Context) -> TritonRepository:
        """Copy the model and write its configuration, reproducibly."""
        from compress.profiling.batch_dependence import numpy_call
        from compress.serve.packaging.model_interface import infer_interface
        from compress.serve.packaging.recorded_measurements import why_not_joined
        from compress.serve.repository.triton import (
            FILES,
            DynamicBatching,
            model_config,
            without_batching,
        )

        refuse_code_for_gpu(model, self.title)
        model.verify()
        with model.open("cpu", context.threads) as predict:
            interface = infer_interface(numpy_call(predict, model.signature), model.signature)
        refuse_nested_output(model, self.title)
        if isinstance(model, AotModel):
            interface = without_batching(interface)
            not_joined = NO_AOT_BATCHING
        else:
            not_joined = why_not_joined(interface.rows_stay_first, context.batch_dependence(model))
        warnings = [NOT_RUN]
        warnings += unchecked_ids(model)
        if isinstance(model, OpenVINOModel):
            warnings.append(MAY_BE_BFLOAT16)
        if not_joined and self.dynamic_batching:
            warnings.append(f"requests are not joined: {not_joined}")
        joins = self.dynamic_batching and not not_joined
        if interface.rows_stay_first and not joins:
            warnings.append(AUTO_COMPLETES)
        payload = f"{self.model_name}/{VERSION}/{FILES[model.kind]}"
        facts: dict[str, Any] = {
            "model_name": self.model_name,
            "model_file": payload,
            "batched": interface.rows_stay_first,
            "parameters": model.parameters(),
            "macs": model.macs(),
            "warnings": warnings,
            **inherited_facts(model),
        }
        with TritonRepository.atomic_write(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            (partial / self.model_name / VERSION).mkdir(parents=True)
            _copy(model, partial / payload)
            text = model_config(
                self.model_name,
                model.kind,
                interface,
                max_batch_size=self.max_batch_size,
                batching=DynamicBatching(self.max_batch_delay_ms, self.queue_size)
                if joins
                else None,
                instances=self.instances,
                threads=self.threads,
            )
            lines = [*unchecked_ids(model), *taken_not_finite(model)]
            comments = "".join(f"# {line}\n" for line in lines)
            (partial / self.model_name / CONFIG).write_text(comments + text, encoding="utf-8")
        logger.info("%s: %s", self.title, NOT_RUN)
        return TritonRepository.from_directory(context.root)


@contextmanager
def open_predictor(
    packaged: Artifact, file: Path, device: str, threads: int
) -> Iterator[Predictor]:
    """Yield a predictor of a repository's model file, run in this process.

    Raises:
        Unavailable: it is native code, compiled for another machine.
    """
    if file.suffix == ".onnx":
        from compress.export.onnx.session import session_predictor

        yield session_predictor(file, threads)
        return
    if file.suffix == ".xml":
        from compress.export.openvino.runtime import compiled, predictor

        yield predictor(compiled(file, threads))
        return
    from compress.common.forward import torch_predictor

    module: Any
    if file.suffix == ".pt2":
        from compress.export.aotinductor.package import load as load_package
        from compress.export.common.host_check import refuse_other_host

        built_for: Any = packaged.fact("built_for")
        refuse_other_host(built_for, file)
        device = "cpu"
        module = load_package(file, packaged.signature, device)
    else:
        from compress.export.torchscript.file_io import load

        module = load(file, device)
    with torch_predictor(module, device, threads) as predict:
        yield predict


def inherited_facts(model: Artifact) -> dict[str, Any]:
    """Return the machine that native code was compiled for, and the rows of embedding tables."""
    facts = model.manifest.facts
    return {name: facts[name] for name in ("built_for", TABLE_ROWS) if name in facts}


def unchecked_ids(model: Artifact) -> list[str]:
    """Return a line for each input of ids, whose range Triton does not know."""
    rows: Any = model.manifest.facts.get(TABLE_ROWS, {})
    return [
        f"{name} must hold ids from 0 to {count - 1}: Triton does not check them, and at others "
        "the runtime answers with another row of the table, or ends"
        for name, count in rows.items()
    ]


def taken_not_finite(model: Artifact) -> list[str]:
    """Return a line for each input whose samples hold NaN or infinities, which Triton passes on."""
    return [
        f"{spec.name} may hold {' and '.join(spec.not_finite)}, as samples of the data do"
        for spec in model.signature.inputs
        if spec.not_finite
    ]


def refuse_nested_output(model: Artifact, title: str) -> None:
    """Raise StageFailed where a TorchScript model returns no tensor or flat list of tensors."""
    import torch

    from compress.export.torchscript.file_io import load

    if not isinstance(model, TorchScriptModel):
        return
    with torch.inference_mode():
        answer = load(model.payload_path)(*model.signature.example())
    parts = answer if isinstance(answer, list | tuple) else [answer]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        raise StageFailed(
            f"{title}: the TorchScript model answers with a {type(answer).__name__} that is no "
            "flat list of tensors, which Triton's PyTorch backend does not read; use export_onnx"
        )


def refuse_code_for_gpu(model: Artifact, title: str) -> None:
    """Raise StageFailed for native code that was compiled for a GPU."""
    built_for: Any = model.manifest.facts.get("built_for", {"device": "cpu"})
    if built_for["device"] != "cpu":
        raise StageFailed(
            f"{title}: the package was compiled for {built_for['device']}, and the repository's "
            "instances are on the CPU; compile it with `device: cpu`"
        )


def _copy(model: Artifact, payload: Path) -> None:
    """Copy the model file under Triton's name for it; external weights keep their names."""
    for name in model.model_files:
        target = payload if name == model.payload else payload.parent / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.path / name, target)
