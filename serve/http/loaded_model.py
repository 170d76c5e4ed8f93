"""Load a sealed artifact for the built-in server: verify its digests, warm it up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.common.errors import ArtifactInvalid, StageFailed, raised_as
from compress.export.exporter import EXPORTERS
from compress.profiling.batch_dependence import numpy_call, seeded_rows
from compress.serve.packaging.model_interface import (
    Interface,
    RecordedMeasurements,
    infer_interface,
    read_recorded,
    refuse_bfloat16,
)
from compress.serve.packaging.request_forms import TOP_LABELS, class_settings, form_settings
from compress.serve.worker.loaders import LOADERS

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.profiling.batch_dependence import Call
    from compress.serve.worker.tensors import Named, Specs

SERVED_KINDS = tuple(LOADERS)
RUNTIMES = {
    kind: exporter.runtime.torch_free_package
    for kind, exporter in EXPORTERS.items()
    if exporter.runtime.torch_free_package
}
"""Packages that run a kind of artifact without torch."""
WARM_CALLS = 3  # TorchScript profiles its first calls and compiles after them


@dataclass(frozen=True)
class ServedModel:
    """A loaded model and its interface."""

    name: str
    kind: str
    signature: Signature
    interface: Interface
    call: Call
    not_joined: str
    """Why requests must not be batched; empty if they may."""
    forms: Named = field(default_factory=dict)
    folder: Path = Path()
    """The artifact's, with the tokenizer."""
    digest: str = ""
    """The artifact's; empty for an archive."""
    classes: Named | None = None
    specs: Specs = ()
    """The inputs as requests are checked against them; by default the signature's."""
    max_rows: int | None = None
    """Most rows of one request, where the file records it."""
    notes: tuple[str, ...] = ()
    """Lines for whoever starts the server."""
    recorded: RecordedMeasurements = field(default_factory=RecordedMeasurements)


@contextmanager
def open_model(
    artifact: Artifact, name: str, threads: int | None = None, report: Path | None = None
) -> Iterator[ServedModel]:
    """Load an artifact's model, after its digests were checked, and warm it up.

    `report` is report.json of the run that made it; by default the one in its run's folder.
    ArtifactInvalid if a file is not the sealed one or cannot be loaded, or the kind is not served;
    StageFailed if the model does not answer its own signature.
    """
    if artifact.kind not in SERVED_KINDS:
        raise ArtifactInvalid(
            f"{artifact.path}: is {artifact.kind!r}, expected one of {', '.join(SERVED_KINDS)} for "
            "the built-in server, genai, or a torchserve archive"
        )
    artifact.verify()
    refuse_bfloat16(artifact.signature)
    with _call_of(artifact, threads or 1) as call:
        with raised_as(
            StageFailed, f"{artifact.path}: the model does not answer its own signature"
        ):
            interface = infer_interface(call, artifact.signature)
            warm_up(call, artifact.signature)
        recorded, stays = read_recorded(artifact, report), interface.rows_stay_first
        not_joined = recorded.why_not_joined(artifact, call, rows_stay_first=stays)
        signature, (forms, notes) = artifact.signature, recorded.served_forms(artifact)
        classes = None
        if artifact.class_names:
            scores = call(*seeded_rows(signature, signature.smallest_batch))[0]
            classes = class_settings(artifact, artifact.class_names, TOP_LABELS, scores)
        if not_joined:
            notes.append(f"requests are not joined: {not_joined}")
        yield ServedModel(
            name=name,
            kind=artifact.kind,
            signature=signature,
            interface=interface,
            call=call,
            not_joined=not_joined,
            forms=form_settings(forms, signature),
            folder=artifact.path,
            digest=artifact.digest,
            classes=classes,
            specs=signature.input_descriptions(artifact.manifest.facts),
            notes=tuple(notes),
            recorded=recorded,
        )


def warm_up(call: Call, signature: Signature) -> None:
    """Call a model until its runtime has profiled and compiled it; StageFailed on NaN."""
    for _ in range(WARM_CALLS):
        outputs = call(*seeded_rows(signature, 1))
    for spec, output in zip(signature.outputs, outputs, strict=True):
        if output.dtype.kind == "f" and np.isnan(output).any():
            raise StageFailed(f"the model answers NaN in {spec.name} to normal inputs")


@contextmanager
def _call_of(artifact: Artifact, threads: int) -> Iterator[Call]:
    """Open a model as a function of numpy arrays; without torch where its runtime needs none."""
    if artifact.kind not in RUNTIMES:
        # A program that keeps state writes it where other calls read it.
        alone = artifact.manifest.facts.get("one_call_at_a_time")
        lock: AbstractContextManager[Any] = Lock() if alone else nullcontext()
        with artifact.open("cpu", threads) as predict:
            call = numpy_call(predict, artifact.signature)

            def call_in_turn(*arrays: Any) -> Any:
                with lock:
                    return call(*arrays)

            yield call_in_turn
        return
    signature = artifact.signature
    settings = {
        "inputs": [spec.model_dump(mode="json") for spec in signature.inputs],
        "outputs": [output.name for output in signature.outputs],
    }
    file = artifact.payload_path
    with raised_as(ArtifactInvalid, f"{file}: {RUNTIMES[artifact.kind]} cannot load it"):
        run = LOADERS[artifact.kind](file, settings, threads)
    yield lambda *arrays: run(arrays)
