"""What goes into an archive: the handler, the payload, a recorded probe and their origin."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.core.artifact import Artifact, FileDigest, canonical_json
from compress.core.errors import StageFailed
from serve.archive import PROBE, PROVENANCE, Packaged, Provenance
from serve.joined import handler_text
from serve.mar import CONFIG, HANDLER, MAR_MANIFEST, mar_manifest
from serve.worker.wire import to_npz

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from compress.core.artifact import Predictor
    from compress.core.signature import Signature
    from compress.core.stage import Context
    from serve.stage import PackageTorchServe
    from serve.worker.tensors import Array

PROBE_ROWS = 4
RESPONSE_SECONDS = 120
STARTUP_SECONDS = 120
JOB_QUEUE_SIZE = 100


@dataclass(frozen=True)
class Probe:
    """What a model answered while it was packed."""

    npz: bytes
    """A few inputs, and the answers."""
    joins_rows: bool
    """Whether rows may be joined to others: axis 0 of every tensor is one dynamic batch."""


def members_of(
    model: Artifact, settings: PackageTorchServe, probe: Probe
) -> dict[str, bytes | Path]:
    """Return the members of an archive by name: bytes, or the file that holds them."""
    import yaml

    config = yaml.safe_dump(model_config(model, settings, probe.joins_rows), sort_keys=True)
    members: dict[str, bytes | Path] = {
        MAR_MANIFEST: mar_manifest(settings.model_name, model.payload),
        HANDLER: handler_text(),
        CONFIG: config.encode(),
        PROBE: probe.npz,
        # A large ONNX model has its weights beside it.
        **{name: model.path / name for name in model.manifest.files},
    }
    return members | {PROVENANCE: provenance(model, members).encode()}


def model_config(model: Artifact, settings: PackageTorchServe, joins_rows: bool) -> dict[str, Any]:
    """Return what TorchServe and our handler read at load."""
    signature = model.signature
    return {
        "minWorkers": settings.workers,
        "maxWorkers": settings.workers,
        "batchSize": settings.batch_size,
        "maxBatchDelay": settings.max_batch_delay_ms,
        "responseTimeout": RESPONSE_SECONDS,
        "startupTimeout": STARTUP_SECONDS,
        "maxRetryTimeoutInSec": STARTUP_SECONDS,
        "jobQueueSize": JOB_QUEUE_SIZE,
        "handler": {
            "kind": model.kind,
            "threads": settings.threads,
            "max_rows": settings.max_rows,
            "joins_rows": joins_rows,
            "probe_atol": settings.probe_atol,
            "inputs": [spec.model_dump(mode="json") for spec in signature.inputs],
            "outputs": [output.name for output in signature.outputs],
            "classes": None,
        },
    }


def record_probe(model: Artifact, context: Context, max_rows: int) -> Probe:
    """Return a few inputs and the model's own answers.

    Raises:
        StageFailed: a tensor has an element type that numpy does not know.
    """
    signature = model.signature
    rows = min(PROBE_ROWS, max_rows)
    fixed = signature.inputs[0].shape[:1]
    if fixed and isinstance(fixed[0], int):
        rows = fixed[0]
    if context.data is not None and "val" in context.data.datasets:
        inputs = next(iter(context.data.batches("val", batch_size=rows, limit=rows))).inputs
    else:
        inputs = signature.example(batch=rows, seed=context.seed)
    with model.open("cpu", context.threads) as predict:
        outputs = predict(*inputs)
        joins_rows = rows_stay_first(predict, signature, inputs, outputs)
    names = [*(spec.name for spec in signature.inputs), *(o.name for o in signature.outputs)]
    named = dict(zip(names, (*inputs, *outputs), strict=True))
    return Probe(to_npz(_as_arrays(named)), joins_rows)


def rows_stay_first(
    predict: Predictor,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> bool:
    """Return whether axis 0 of every output counts the same rows as axis 0 of every input.

    The model is asked for another number of rows: an axis of one size could be any other axis, like
    the layers of a recurrent state.
    """
    heads = {next(iter(spec.shape), None) for spec in signature.inputs}
    if heads != {signature.batch_axis} or heads == {None}:
        return False
    rows = len(inputs[0])
    other = rows - 1 or 2
    places = [i % rows for i in range(other)]
    try:
        others = predict(*(tensor[places] for tensor in inputs))
    except Exception:  # noqa: BLE001 - a model may refuse other sizes in any way
        return False
    found = {(tuple(a.shape[:1]), tuple(b.shape[:1])) for a, b in zip(outputs, others, strict=True)}
    return found == {((rows,), (other,))}


def provenance(model: Artifact, members: Mapping[str, bytes | Path]) -> str:
    """Return what an archive says about its origin."""
    packaged = Packaged(
        kind=model.kind,
        digest=model.digest,
        payload=model.payload,
        sha256=model.manifest.files[model.payload].sha256,
    )
    record = Provenance(
        signature=model.signature,
        artifact=packaged,
        lineage=model.manifest.lineage,
        members={name: digest_of(content) for name, content in members.items()},
    )
    return canonical_json(record.model_dump(mode="json")) + "\n"


def digest_of(content: bytes | Path) -> FileDigest:
    """Return the size and hash of bytes, or of a file's."""
    data = content if isinstance(content, bytes) else content.read_bytes()
    return FileDigest(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def _as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    import torch

    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raise StageFailed(
                f"package_torchserve: {name} is bfloat16, which requests cannot carry; "
                "expected a model with float32 inputs and outputs"
            )
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
