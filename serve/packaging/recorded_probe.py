"""Record a probe while a model is packed: a few inputs and its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.serve.packaging.model_interface import rows_stay_first
from compress.serve.packaging.recorded_measurements import why_not_joined
from compress.serve.packaging.request_forms import are_probabilities
from compress.serve.worker.wire import to_npz

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.serve.worker.tensors import Array

PROBE_ROWS = 4


@dataclass(frozen=True)
class Probe:
    """A few inputs, a model's outputs for them, and whether its requests may be batched."""

    arrays: Mapping[str, Array]
    """Inputs and outputs by name."""
    rows_stay_first: bool
    """Whether axis 0 of every tensor counts the same rows, whose number is variable."""
    not_joined: str
    """Why requests must not be batched; empty if they may."""

    @property
    def npz(self) -> bytes:
        """The arrays as a file, the same bytes for the same arrays."""
        return to_npz(self.arrays)

    def not_finite(self, name: str) -> dict[str, bool]:
        """Return which of NaN and infinities a tensor holds, as float attention masks do."""
        import numpy as np

        array = self.arrays[name]
        tests = {"nan": np.isnan, "infinities": np.isinf} if array.dtype.kind == "f" else {}
        return {kind: True for kind, holds in tests.items() if holds(array).any()}

    def are_probabilities(self, name: str) -> bool:
        """Return whether an output's rows are probabilities rather than logits."""
        return are_probabilities(self.arrays[name])


def record_probe(model: Artifact, context: Context, max_rows: int) -> Probe:
    """Run a model on a few rows of `val`, or on random inputs without data."""
    signature = model.signature
    rows = min(PROBE_ROWS, max_rows)
    first_axis = signature.inputs[0].shape[:1]
    if first_axis and isinstance(first_axis[0], int):
        rows = first_axis[0]
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


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Convert tensors to numpy arrays; StageFailed for element types that numpy does not know."""
    import torch

    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raise StageFailed(
                f"package_torchserve: {name} is bfloat16, which requests cannot carry; "
                "expected a model with float32 inputs and outputs"
            )
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
