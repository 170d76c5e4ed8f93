"""Inputs on which modules are traced and slices are verified: seeded, of other sizes, and real."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from compress.pruning.dependency.graph import trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.pruning.channel_settings import ChannelSelection
    from compress.pruning.dependency.channel_groups import AxisGraph

LARGER_SIZE = 12
"""Size of a named axis at which a slice is verified once more; seeded examples have 8."""
ROWS = 4
"""Real samples on which a slice is verified if the batch size is dynamic. Each adds a forward pass
in float64 to every comparison."""
SAMPLES_SEARCHED = 128
"""Samples that are read to find those with extreme values, if no calibration samples are given."""


@dataclass(frozen=True)
class VerificationInputs:
    """What a module is traced with, and its slices are compared on."""

    seeded: Sequence[torch.Tensor]
    """Seeded example, on which the module is traced."""
    others: Sequence[Sequence[torch.Tensor]] = ()
    """Inputs of other sizes; those for which the module fails are left out."""
    real: Sequence[torch.Tensor] | None = None
    """A batch of real samples, which is compared first."""
    across_norms: bool = False
    """Whether channels are removed over which normalisations take statistics."""

    @classmethod
    def from_signature(
        cls,
        signature: Signature,
        context: Context,
        selection: ChannelSelection,
        batches: Sequence[Batch] = (),
    ) -> Self:
        """Build all inputs of a model; real samples are those of :func:`real_inputs`."""
        seed, real = context.seed, real_inputs(signature, context, batches)
        others = other_sizes(signature, seed)
        return cls(signature.example(seed=seed), others, real, selection.across_norms)

    def trace(self, module: nn.Module) -> AxisGraph:
        """Trace a module's axis graph on the seeded example; StageFailed where that fails."""
        return trace(module, self.seeded, across_norms=self.across_norms)


def other_sizes(signature: Signature, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Build inputs that are larger along one dynamic axis each, except the batch axis."""
    axes = [axis for axis in signature.dynamic_axes if axis != signature.batch_axis]
    larger = {axis: signature.bounds(axis).nearest(LARGER_SIZE) for axis in axes}
    return [signature.example(seed=seed, sizes={axis: larger[axis]}) for axis in axes]


def real_inputs(
    signature: Signature, context: Context, batches: Sequence[Batch] = ()
) -> tuple[torch.Tensor, ...] | None:
    """Return a batch of real samples with the largest and smallest values, or None without data.

    They are taken from ``batches``, calibration samples in memory, or read if there are none.
    """
    data = context.data
    if not batches and data is not None:
        for name in (data.calibration_split, "val"):
            if name in data.datasets:
                batches = list(data.batches(name, limit=SAMPLES_SEARCHED))
                break
    if not batches:
        return None
    shapes = [[x.shape[1:] for x in batch.inputs] for batch in batches]
    same_shape = [batches[i].inputs for i, own in enumerate(shapes) if own == shapes[0]]
    columns = tuple(torch.cat(column) for column in zip(*same_shape, strict=True))
    # A model's code may take other branches at extreme values, so these samples come first.
    extreme: list[int] = []
    for column in columns:
        if column.dim() > 1 and column.numel():
            numbers = column.flatten(1).double()
            extreme += [int(numbers.amax(1).argmax()), int(numbers.amin(1).argmin())]
    size = signature.inputs[0].shape[0] if signature.inputs[0].shape else ROWS
    rows = size if isinstance(size, int) else ROWS
    order = list(dict.fromkeys([*extreme, *range(len(columns[0]))]))
    chosen = torch.tensor([order[i % len(order)] for i in range(rows)])
    return tuple(column[chosen] for column in columns)
