"""Compares the ranges of what models read in two samples, such as raw and scaled pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from compress.data.batch import Batch

SAMPLES = 512
"""Samples of which ranges are measured, at most."""
# Half as wide again, or shifted by half a standard deviation; bytes beside fractions are 255 times.
UNLIKE = 1.5
"""Samples are unlike each other where :func:`unlikeness` is above."""


@dataclass(frozen=True)
class InputRange:
    """Mean and standard deviation of one input over a sample."""

    mean: float
    deviation: float


def input_ranges(batches: Iterable[Batch]) -> list[InputRange | None]:
    """Return the range of each input over some batches; None for inputs that are no floats."""
    import torch

    sums: dict[int, torch.Tensor] = {}
    count = 0
    for batch in batches:
        count = max(count, len(batch.inputs))
        for i, values in enumerate(batch.inputs):
            if values.is_floating_point() and values.numel():
                own = values.double()
                part = torch.stack((torch.tensor(own.numel()), own.sum(), own.square().sum()))
                sums[i] = sums.get(i, torch.zeros(3, dtype=torch.float64)) + part
    found: list[InputRange | None] = [None] * count
    for i, of_input in sums.items():
        number, total, squares = of_input.tolist()
        mean = total / number
        # Rounding may leave a constant input a variance below 0.
        found[i] = InputRange(mean, max(squares / number - mean**2, 0.0) ** 0.5)
    return found


def unlikeness(sample: Sequence[InputRange | None], val: Sequence[InputRange | None]) -> float:
    """Return by how many times the input that differs most is wider, narrower or shifted.

    1 is alike; a shift by one standard deviation of `val` counts as 2.
    """
    found = 1.0
    for own, other in zip(sample, val, strict=False):
        if own is None or other is None or other.deviation <= 0:
            continue
        ratio = own.deviation / other.deviation
        wider = max(ratio, 1 / ratio) if ratio > 0 else float("inf")
        shift = 1 + abs(own.mean - other.mean) / other.deviation
        found = max(found, wider, shift)
    return found


def with_ranges(
    batch: Batch, own: Sequence[InputRange | None], wanted: Sequence[InputRange | None]
) -> Batch:
    """Return a batch whose inputs are scaled and shifted from their own range to another one."""
    inputs = []
    for values, before, after in zip(batch.inputs, own, wanted, strict=True):
        if before is None or after is None or before.deviation <= 0:
            inputs.append(values)
            continue
        scaled = (values - before.mean) * (after.deviation / before.deviation) + after.mean
        inputs.append(scaled.to(values.dtype))
    return replace(batch, inputs=tuple(inputs))
