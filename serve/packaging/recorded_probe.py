"""What a model answered while it was packed, and what its answers tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from serve.packaging.joinable import why_not_joined
from serve.worker.wire import to_npz

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.core.stage import Context
    from serve.worker.tensors import Array

PROBE_ROWS = 4


@dataclass(frozen=True)
class Probe:
    """A few inputs, a model's own answers to them, and whether it may answer requests together."""

    arrays: Mapping[str, Array]
    """Inputs and outputs by name."""
    rows_stay_first: bool
    """Whether axis 0 of every tensor counts the same rows, of which there may be any number."""
    not_joined: str
    """Why requests must not be answered together; empty where they may."""

    @property
    def npz(self) -> bytes:
        """The arrays as a file, the same bytes for the same arrays."""
        return to_npz(self.arrays)

    def holds_infinity(self, name: str) -> bool:
        """Return whether a tensor is meant to hold infinities, as float masks do."""
        import numpy as np

        array = self.arrays[name]
        return array.dtype.kind == "f" and bool(np.isinf(array).any())

    def are_probabilities(self, name: str) -> bool:
        """Return whether an output's rows are probabilities already, and no logits."""
        import numpy as np

        rows = self.arrays[name].astype(np.float64)
        return bool((rows >= 0).all() and np.allclose(rows.sum(axis=-1), 1, 0, 1e-3))


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
        stay_first = rows_stay_first(predict, signature, inputs, outputs)
    not_joined = why_not_joined(stay_first, context.batch_dependence(model))
    names = [*(spec.name for spec in signature.inputs), *(o.name for o in signature.outputs)]
    named = dict(zip(names, (*inputs, *outputs), strict=True))
    return Probe(as_arrays(named), stay_first, not_joined)


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


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as numpy's arrays.

    Raises:
        StageFailed: one has an element type that numpy does not know.
    """
    import torch

    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raise StageFailed(
                f"package_torchserve: {name} is bfloat16, which requests cannot carry; "
                "expected a model with float32 inputs and outputs"
            )
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
