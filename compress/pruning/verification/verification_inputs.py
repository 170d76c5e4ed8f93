"""Inputs on which slices are verified besides seeded examples: other sizes, and real samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.data.batch import Batch

LARGER_SIZE = 12
"""Size of a named axis at which a slice is verified once more; seeded examples have 8."""
ROWS = 4
"""Real samples on which a slice is verified if the batch size is dynamic. Each adds a forward pass
in float64 to every comparison."""
SAMPLES_SEARCHED = 128
"""Samples that are read to find those with extreme values, if no calibration samples are given."""


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
