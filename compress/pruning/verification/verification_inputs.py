"""The inputs on which cuts are proven, besides seeded ones: other sizes, and real samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.data.batch import Batch

LARGER = 12
"""Size of a named axis at which a cut is proven once more; examples have 8."""
ROWS = 4
"""Real samples that a cut is proven on, where the batch size is not fixed; each costs a forward
pass in float64 a comparison."""
SEARCHED = 128
"""Samples read to find those with the largest numbers, where none are at hand."""


def other_sizes(signature: Signature, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs that are larger along one named axis each, the batch left out."""
    axes = [axis for axis in signature.dynamic_axes if axis != signature.batch_axis]
    larger = {axis: signature.bounds(axis).nearest(LARGER) for axis in axes}
    return [signature.example(seed=seed, sizes={axis: larger[axis]}) for axis in axes]


def real_inputs(
    signature: Signature, context: Context, batches: Sequence[Batch] = ()
) -> tuple[torch.Tensor, ...] | None:
    """Return a batch of real samples, those with the largest and smallest numbers among them.

    Args:
        signature: the model's interface.
        context: with the data; without any there is none to return.
        batches: calibration samples that are in memory; others are read where there are none.
    """
    found = [batch.inputs for batch in batches or _read(context)]
    if not found:
        return None
    alike = [inputs for inputs in found if _shapes(inputs) == _shapes(found[0])]
    columns = tuple(torch.cat(column) for column in zip(*alike, strict=True))
    size = signature.inputs[0].shape[0] if signature.inputs[0].shape else ROWS
    rows = size if isinstance(size, int) else ROWS
    order = list(dict.fromkeys([*_extreme_rows(columns), *range(len(columns[0]))]))
    chosen = torch.tensor([order[i % len(order)] for i in range(rows)])
    return tuple(column[chosen] for column in columns)


def _read(context: Context) -> list[Batch]:
    data = context.data
    names = (data.calibration_split, "val") if data is not None else ()
    for name in names:
        if data is not None and name in data.datasets:
            count = len(data.split(name))  # type: ignore[arg-type]  # Splits admits sized ones only
            order = torch.randperm(count, generator=torch.Generator().manual_seed(context.seed))
            return list(data.read(name, order[:SEARCHED].tolist(), data.batch_size))
    return []


def _extreme_rows(columns: Sequence[torch.Tensor]) -> Iterator[int]:
    """Yield the rows that hold the largest and the smallest number of each input."""
    for column in columns:
        if column.dim() > 1 and column.numel():
            numbers = column.flatten(1).double()
            yield int(numbers.amax(1).argmax())
            yield int(numbers.amin(1).argmin())


def _shapes(inputs: Sequence[torch.Tensor]) -> list[torch.Size]:
    return [x.shape[1:] for x in inputs]
