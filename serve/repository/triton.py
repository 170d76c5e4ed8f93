"""The `triton` artifact, a Triton model repository, and the stage `package_triton`."""

from __future__ import annotations

import logging
import shutil
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.artifacts.artifact import Artifact
from compress.common.config import Count
from compress.common.errors import StageFailed
from compress.common.forward import opened_model
from compress.common.signature import TABLE_ROWS
from compress.core.gates import AnyGate, LabelAgreement, Parity
from compress.core.stage import Stage
from export.exporter import EXPORTERS
from serve.repository.triton_config import CONFIG, VERSION, backends, refuse_foreign_entries

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


class TritonRepository(Artifact):
    """A model repository: ``<name>/config.pbtxt`` and ``<name>/1/`` with the model.

    ``open`` runs the model file in this process. Triton ignores the artifact's manifest beside the
    model's folder, because it is no folder.
    """

    kind: ClassVar[str] = "triton"
    payload: ClassVar[str] = CONFIG
    only_device: ClassVar[str] = "cpu"

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
        with open_predictor(self, self.payload_path, threads) as predict:
            yield predict


class PackageTriton(Stage[Artifact, TritonRepository]):
    """Lay a model out as a repository of Triton's, with a configuration from its signature.

    For files whose runtime has a backend there: Triton joins requests, and runs several copies.

        - {stage: package_triton, model_name: resnet, max_batch_delay_ms: 2, instances: 2}
    """

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

    @classmethod
    def reads(cls) -> Any:
        """Return the artifacts whose runtime says how Triton runs them."""
        return reduce(or_, (EXPORTERS[kind].writes() for kind in backends()))

    def run(self, model: Artifact, context: Context) -> TritonRepository:
        """Copy the model and write its configuration, reproducibly."""
        from compress.profiling.batch_dependence import numpy_call
        from serve.packaging.joinable import why_not_joined
        from serve.packaging.model_interface import infer_interface
        from serve.repository.triton_config import (
            DynamicBatching,
            model_config,
            without_batching,
        )

        backend = backends()[model.kind]
        refuse_code_for_gpu(model, self.title)
        model.verify()
        with model.open("cpu", context.threads) as predict:
            interface = infer_interface(numpy_call(predict, model.signature), model.signature)
        if backend.refuse:
            backend.refuse(model, self.title)
        not_joined = backend.not_batched
        if not_joined:
            interface = without_batching(interface)
        else:
            not_joined = why_not_joined(interface.rows_stay_first, context.batch_dependence(model))
        warnings = [NOT_RUN, *unchecked_ids(model)]
        if backend.warning:
            warnings.append(backend.warning)
        if not_joined and self.dynamic_batching:
            warnings.append(f"requests are not joined: {not_joined}")
        joins = self.dynamic_batching and not not_joined
        if interface.rows_stay_first and not joins:
            warnings.append(AUTO_COMPLETES)
        payload = f"{self.model_name}/{VERSION}/{backend.file}"
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
            comments = "".join(f"# {line}\n" for line in unchecked_ids(model))
            (partial / self.model_name / CONFIG).write_text(comments + text, encoding="utf-8")
        logger.info("%s: %s", self.title, NOT_RUN)
        return TritonRepository.from_directory(context.root)


@contextmanager
def open_predictor(packaged: Artifact, file: Path, threads: int) -> Iterator[Predictor]:
    """Yield a predictor of a repository's model file, run in this process on the CPU.

    Raises:
        Unavailable: it is native code, compiled for another machine.
    """
    kind = next(k for k, backend in backends().items() if backend.file.endswith(file.suffix))
    model, facts = EXPORTERS[kind].writes(), packaged.manifest.facts
    with model.open_file(file, packaged.signature, facts, "cpu", threads) as predict:
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
