"""What goes into an archive: the handler, the payload, a recorded probe and their origin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from serve.packaging.model_card import MODEL_CARD, card
from serve.packaging.preprocessing import TOKENIZER
from serve.packaging.provenance import PROVENANCE, Packaged, Provenance, digests_of
from serve.torchserve.artifact import PROBE
from serve.torchserve.handler_bundle import handler_text
from serve.torchserve.mar_file import CONFIG, HANDLER, MAR_MANIFEST, mar_manifest

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.run_history import History
    from serve.packaging.recorded_probe import Probe
    from serve.torchserve.stage import PackageTorchServe

STARTUP_SECONDS = 120


def members_of(
    model: Artifact,
    served: Artifact,
    settings: PackageTorchServe,
    probe: Probe,
    history: History | None,
) -> dict[str, bytes | Path]:
    """Return the members of an archive by name: bytes, or the file that holds them.

    Args:
        model: the artifact that was handed in.
        served: the same, or an eager model's graph.
        settings: the stage's.
        probe: what the served artifact answered.
        history: the road to the model, where it is known.
    """
    import yaml

    config = yaml.safe_dump(model_config(served, settings, probe), sort_keys=True)
    members: dict[str, bytes | Path] = {
        MAR_MANIFEST: mar_manifest(settings.model_name, served.payload),
        HANDLER: handler_text(),
        CONFIG: config.encode(),
        PROBE: probe.npz,
        # A large ONNX model has its weights beside it.
        **{name: served.path / name for name in served.manifest.files},
    }
    if settings.text:
        members[TOKENIZER] = Path(settings.text.tokenizer).read_bytes()
    packaged = Packaged(
        kind=served.kind,
        digest=served.digest,
        payload=served.payload,
        sha256=served.manifest.files[served.payload].sha256,
        traced_from="" if served is model else model.digest,
    )
    record = Provenance(
        signature=model.signature,
        artifact=packaged,
        lineage=model.manifest.lineage,
        history=history,
        members={},
    )
    members[MODEL_CARD] = card(settings.model_name, record, served.payload_bytes).encode()
    record = record.model_copy(update={"members": digests_of(members)})
    return members | {PROVENANCE: record.sealed()}


def model_config(served: Artifact, settings: PackageTorchServe, probe: Probe) -> dict[str, Any]:
    """Return what TorchServe and our handler read at load.

    Raises:
        StageFailed: a setting does not fit the model.
    """
    signature = served.signature
    inputs = signature.input_descriptions()
    for spec in inputs:
        if probe.holds_infinity(spec["name"]):
            spec["infinities"] = True
    handler: dict[str, Any] = {
        "kind": served.kind,
        "threads": settings.threads,
        "max_rows": settings.max_rows,
        "rows_stay_first": probe.rows_stay_first,
        "joins_rows": not probe.not_joined,
        "probe_atol": settings.probe_atol,
        "inputs": inputs,
        "outputs": [output.name for output in signature.outputs],
        "classes": classes(served, settings, probe),
    }
    for fact in ("built_for", "optimize_for_inference"):
        if served.manifest.facts.get(fact):
            handler[fact] = served.manifest.facts[fact]
    if settings.image:
        handler["image"] = settings.image.packed(signature)
    if settings.text:
        handler["text"] = settings.text.packed(signature)
    return {
        "minWorkers": settings.workers,
        "maxWorkers": settings.workers,
        "batchSize": 1 if probe.not_joined else settings.batch_size,
        "maxBatchDelay": settings.max_batch_delay_ms,
        "responseTimeout": settings.response_seconds,
        "startupTimeout": STARTUP_SECONDS,
        "maxRetryTimeoutInSec": STARTUP_SECONDS,
        "jobQueueSize": settings.queue_size,
        "handler": handler,
    }


def classes(served: Artifact, settings: PackageTorchServe, probe: Probe) -> dict[str, Any] | None:
    """Return how the first output's classes are named, or None where they are not.

    Raises:
        StageFailed: there are names, and other than one for each column of the first output.
    """
    names = settings.class_names or names_within(served)
    if not names:
        return None
    first = served.signature.outputs[0].name
    shape = list(probe.arrays[first].shape)
    if len(shape) != 2 or shape[1] != len(names):
        raise StageFailed(
            f"class_names: {len(names)} names, and {first} has shape {shape}, expected "
            f"[rows, {len(names)}]"
        )
    top, softmax = min(settings.top_labels, len(names)), not probe.are_probabilities(first)
    return {"names": list(names), "top": top, "softmax": softmax}


def names_within(served: Artifact) -> tuple[str, ...]:
    """Return the class names that an ONNX file holds."""
    if served.kind != "onnx":
        return ()
    import json

    import onnx

    proto = onnx.load_model(served.payload_path, load_external_data=False)
    held = {entry.key: entry.value for entry in proto.metadata_props}
    return tuple(json.loads(held.get("class_names", "[]")))
