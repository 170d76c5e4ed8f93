"""Inputs on which slices are verified besides seeded examples: other sizes, and real samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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

    Args:
        signature: the model's interface.
        context: provides the data.
        batches: calibration samples in memory; if there are none, samples are read.
    """
    samples = [batch.inputs for batch in batches or _read_samples(context)]
    if not samples:
        return None
    same_shape = [inputs for inputs in samples if _shapes(inputs) == _shapes(samples[0])]
    columns = tuple(torch.cat(column) for column in zip(*same_shape, strict=True))
    size = signature.inputs[0].shape[0] if signature.inputs[0].shape else ROWS
    rows = size if isinstance(size, int) else ROWS
    order = list(dict.fromkeys([*_extreme_rows(columns), *range(len(columns[0]))]))
    chosen = torch.tensor([order[i % len(order)] for i in range(rows)])
    return tuple(column[chosen] for column in columns)


def _read_samples(context: Context) -> list[Batch]:
    data = context.data
    names = (data.calibration_split, "val") if data is not None else ()
    for name in names:
        if data is not None and name in data.datasets:
            count = len(data.split(name))  # type: ignore[arg-type]  # Splits admits sized ones only
            order = torch.randperm(count, generator=torch.Generator().manual_seed(context.seed))
            return list(data.read(name, order[:SAMPLES_SEARCHED].tolist(), data.batch_size))
    return []


def _extreme_rows(columns: Sequence[torch.Tensor]) -> Iterator[int]:
    """Yield the rows with the largest and the smallest value of each input."""
    for column in columns:
        if column.dim() > 1 and column.numel():
            numbers = column.flatten(1).double()
            yield int(numbers.amax(1).argmax())
            yield int(numbers.amin(1).argmin())


def _shapes(inputs: Sequence[torch.Tensor]) -> list[torch.Size]:
    return [x.shape[1:] for x in inputs]
