"""The stage `package_torchserve`: pack a validated model for TorchServe."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from compress.artifacts.carried_files import TOKENIZER
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count
from compress.common.errors import StageFailed
from compress.common.requirements import JAVA, Requirement, pip_install
from compress.core.gates import AnyGate, LabelAgreement, Parity
from compress.core.stage import Stage
from compress.export.aotinductor.stage import AotModel
from compress.export.exporter import source_counts
from compress.export.onnx.stage import OnnxModel
from compress.export.openvino.stage import OpenVINOModel
from compress.export.torchscript.stage import TorchScriptModel
from compress.serve.packaging import provenance, request_forms
from compress.serve.packaging.provenance import PROVENANCE, digest_of
from compress.serve.packaging.request_forms import (
    AudioInput,
    Forms,
    ImageInput,
    TextInput,
    form_settings,
)
from compress.serve.torchserve import mar_file
from compress.serve.torchserve.artifact import PROBE, TorchServeArchive

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.verdict import History
    from compress.serve.packaging.model_interface import Probe

logger = logging.getLogger(__name__)

STARTUP_SECONDS = 120  # time limit of a worker's start

Servable = OnnxModel | OpenVINOModel | TorchScriptModel | AotModel | GraphModel | EagerModel


class PackageTorchServe(Stage[Servable, TorchServeArchive]):
    """Pack a model into a `.mar` and hold what TorchServe answers against what was validated.

    An eager model is packed as its traced graph: the author's code does not travel.
    """

    stage: Literal["package_torchserve"] = "package_torchserve"
    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "model"
    """Name under which it is served: `/predictions/<model_name>`."""
    workers: Count = 1
    """Processes that answer; workers x threads should not exceed the cores."""
    batch_size: Count = 1
    """Requests that TorchServe may join into one call of the model. Written as 1, with a warning,
    unless rows of `val` have shown that they do not change each other's answers."""
    max_batch_delay_ms: Count = 10
    """How long a request waits to be joined by others, in milliseconds."""
    queue_size: Count = 100
    """Requests that may wait; those above it are answered 503 at once."""
    response_seconds: Count = 120
    """How long the model may take for one call; the worker of a slower one is ended and another
    started, and those who wait are answered 500."""
    max_rows: Count = 128
    """Samples that one request may hold. Keep rows x output bytes below the server's
    `max_response_size` (6.5 MB by default): a larger response kills the worker."""
    threads: Count = 1
    """CPU threads of each worker's model; the environment variable HANDLER_THREADS overrides it."""
    class_names: tuple[str, ...] = ()
    """Names of the first output's classes: JSON answers then hold the likeliest labels of each row.
    By default those that an ONNX file holds, or `id2label` of a Hugging Face folder."""
    top_labels: Count = 5
    """How many labels of each row."""
    image: ImageInput | None = None
    """How PNG and JPEG bodies become the input, where the model takes an image; by default as a
    Hugging Face folder's `preprocessor_config.json` says."""
    text: TextInput | None = None
    """How texts become the inputs, where the model takes tokens; by default as a Hugging Face
    folder's tokenizer does."""
    audio: AudioInput | None = None
    """How WAV and FLAC bodies become the input, where the model takes sounds; by default as a
    Hugging Face folder's `preprocessor_config.json` says."""
    probe_atol: Annotated[float, Field(ge=0)] = 1e-4
    """Largest difference from the recorded probe with which a worker still becomes ready."""
    gates: tuple[AnyGate, ...] = (LabelAgreement(minimum=1.0), Parity(atol=1e-4))
    """Rules that the served model must satisfy; by default it answers as its input does."""

    records_history: ClassVar[bool] = True
    requirements: ClassVar[tuple[Requirement, ...]] = (
        JAVA,
        Requirement(what="ts", install=pip_install("serve")),
    )

    @property
    def uses_data(self) -> bool:
        """The probe's inputs come from `val`, where there is one."""
        return True

    @property
    def machine_parts(self) -> dict[str, Any]:
        """The handler's hash: an archive with another version's handler is not started here."""
        return {"handler": hashlib.sha256(mar_file.handler_text()).hexdigest()}

    def resolve_paths(self, folder: Path, code: Path) -> Self:
        """Resolve the tokenizer's path."""
        if self.text is None:
            return self
        return self.model_copy(update={"text": self.text.resolve_paths(folder)})

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that decide the result; the tokenizer by its content."""
        return super().own_settings() | ({"text": self.text.identity()} if self.text else {})

    @property
    def forms(self) -> Forms:
        """What requests may hold beside tensors."""
        return {form.kind: form for form in (self.image, self.text, self.audio) if form}

    def check_inputs(self, signature: Signature) -> None:
        """Check what requests hold against the signature before anything is trained or exported."""
        form_settings(self.forms, signature)

    def with_carried(self, model: Servable) -> Self:
        """Return the stage with the artifact's `image`, `text` and `audio` where left out here."""
        carried = request_forms.forms_of(model)
        named = [*(["class_names"] if model.class_names else []), *carried]
        used = [name for name in named if not getattr(self, name)]
        overridden = ", ".join(name for name in named if getattr(self, name))
        if named:
            logger.info(
                "%s: from the artifact's Hugging Face files: %s; from this stage's settings: %s",
                self.title,
                ", ".join(used) or "nothing",
                overridden or "nothing",
            )
        return self.model_copy(update={name: carried[name] for name in used if name in carried})

    def run(self, model: Servable, context: Context) -> TorchServeArchive:
        """Pack the model; the same model, settings and data give the same bytes."""
        from compress.serve.packaging.model_interface import record_probe
        from compress.serve.packaging.val_preparation import compare_preparation
        from compress.serve.torchserve.process import find_torchserve

        find_torchserve()
        model.verify()
        facts: dict[str, Any] = {
            "model_name": self.model_name,
            "max_rows": self.max_rows,
            "packaged": {"kind": model.kind, "digest": model.digest},
            **source_counts(model),
        }
        with (
            open_packaged(model) as served,
            TorchServeArchive.atomic_write(
                context.root, model.signature, lineage=self.lineage(model), facts=facts
            ) as partial,
        ):
            probe = record_probe(served, context, self.max_rows)
            stage, warnings = self.with_carried(model), []
            if probe.not_joined and self.batch_size > 1:
                warnings.append(f"batch_size is 1, not {self.batch_size}: {probe.not_joined}")
            if context.data is not None and "val" in context.data.datasets:
                forms = stage.forms
                for found in compare_preparation(forms, model.signature, context.data):
                    if found.is_wrong:
                        raise StageFailed(found.difference)
                    warnings += [found.difference] if found.difference else []
            if warnings:
                facts["warnings"] = warnings
            members = archive_members(model, served, stage, probe, context.history)
            facts["provenance"] = digest_of(members[PROVENANCE]).sha256
            mar_file.write_mar(partial / TorchServeArchive.payload, members)
        return TorchServeArchive.from_directory(context.root)


@contextmanager
def open_packaged(model: Servable) -> Iterator[Artifact]:
    """Yield the artifact to pack: the model, or the traced graph of an eager one."""
    from compress.serve.packaging.model_interface import refuse_code_for_gpu

    refuse_code_for_gpu(model, "package_torchserve", "archives are served on the CPU")
    if not isinstance(model, EagerModel):
        yield model
        return
    with TemporaryDirectory(prefix="compress-graph-") as folder:
        yield GraphModel.from_eager(model, Path(folder) / "graph")


def archive_members(
    model: Artifact,
    served: Artifact,
    stage: PackageTorchServe,
    probe: Probe,
    history: History | None,
) -> dict[str, bytes | Path]:
    """Return an archive's content by member name: of `model`, or of its traced graph `served`."""
    import yaml

    from compress.serve.worker.wire import to_npz

    config = yaml.safe_dump(handler_config(served, stage, probe), sort_keys=True)
    members: dict[str, bytes | Path] = {
        mar_file.MAR_MANIFEST: mar_file.mar_manifest(stage.model_name, served.payload),
        mar_file.HANDLER: mar_file.handler_text(),
        mar_file.CONFIG: config.encode(),
        PROBE: to_npz(probe.arrays),
        # A large ONNX model has its weights beside it.
        **{name: served.path / name for name in served.model_files},
    }
    if stage.text:
        members[TOKENIZER] = Path(stage.text.tokenizer).read_bytes()
    record = provenance.Provenance(
        signature=model.signature,
        artifact=provenance.Packaged(
            kind=served.kind,
            digest=served.digest,
            payload=served.payload,
            sha256=served.manifest.files[served.payload].sha256,
            traced_from="" if served is model else model.digest,
        ),
        lineage=model.manifest.lineage,
        history=history,
        members={},
    )
    card = provenance.model_card(stage.model_name, record, served.payload_bytes)
    members[provenance.MODEL_CARD] = card.encode()
    digests = {name: digest_of(content) for name, content in members.items()}
    record = record.model_copy(update={"members": digests})
    return members | {PROVENANCE: record.sealed()}


def handler_config(served: Artifact, stage: PackageTorchServe, probe: Probe) -> dict[str, Any]:
    """Return the content of ``model-config.yaml``, for TorchServe and for our handler."""
    signature = probe.signature
    names = stage.class_names or served.class_names
    first = signature.outputs[0].name
    classes = request_forms.class_settings(served, names, stage.top_labels, probe.arrays[first])
    if stage.class_names and classes is None:
        shape = list(probe.arrays[first].shape)
        raise StageFailed(
            f"class_names: {len(names)} names, and {first} has shape {shape}, expected "
            f"[rows, {len(names)}]"
        )
    handler: dict[str, Any] = {
        "kind": served.kind,
        "threads": stage.threads,
        "max_rows": stage.max_rows,
        "rows_stay_first": probe.rows_stay_first,
        "joins_rows": not probe.not_joined,
        "probe_atol": stage.probe_atol,
        "inputs": signature.input_descriptions(served.manifest.facts),
        "outputs": [output.name for output in signature.outputs],
        "classes": classes,
    }
    for fact in ("built_for", "optimize_for_inference", "one_call_at_a_time"):
        if served.manifest.facts.get(fact):
            handler[fact] = served.manifest.facts[fact]
    handler |= form_settings(stage.forms, signature)
    return {
        "minWorkers": stage.workers,
        "maxWorkers": stage.workers,
        "batchSize": 1 if probe.not_joined else stage.batch_size,
        "maxBatchDelay": stage.max_batch_delay_ms,
        "responseTimeout": stage.response_seconds,
        "startupTimeout": STARTUP_SECONDS,
        "maxRetryTimeoutInSec": STARTUP_SECONDS,
        "jobQueueSize": stage.queue_size,
        "handler": handler,
    }
