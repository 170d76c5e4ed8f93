"""Differences between tensors in float64, which never treat NaN as a small difference."""

# Python's ``max(0.0, nan)`` is 0.0 and ``nan > limit`` is False, so that a naive comparison accepts
# NaN. All comparisons of two models' outputs use these functions.

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from compress.common.lazy_modules import torch

if TYPE_CHECKING:
    Pair = tuple[torch.Tensor, torch.Tensor]

AT_ONCE = 2**20  # elements converted to float64 at a time, to bound memory: 8 MiB each


def relative_error(expected: torch.Tensor, got: torch.Tensor, least_norm: float = 0.0) -> float:
    """Return ‖got - expected‖ / ‖expected‖; equal infinities count as equal.

    The norm is at least `least_norm`. Infinite if shapes or the places of finite elements differ.
    """
    return relative_error_of_batches([(expected, got)], least_norm)


def relative_error_of_batches(batches: Iterable[Pair], least_norm: float = 0.0) -> float:
    """Return the relative error over all pairs of tensors together."""
    error = norm = 0.0
    for expected, got in batches:
        if expected.shape != got.shape:
            return math.inf
        for a, b in _parts(expected, got):
            a, b = measured(a, b)
            if not (a.isfinite().all() and b.isfinite().all()):
                return math.inf
            error += float((b - a).square_().sum())
            norm += float(a.square().sum())
    # 1e-9: finite also where all is expected to be 0
    return float(error**0.5 / max(norm**0.5, least_norm, 1e-9))


def largest_difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest absolute difference of two elements; 0 for empty tensors.

    Equal infinities count as equal. NaN if either tensor holds a NaN; infinite if shapes differ.
    """
    if expected.shape != got.shape:
        return math.inf
    return largest(
        float((b.double() - a.double()).abs().masked_fill_(a == b, 0).max())
        for a, b in _parts(expected, got)
        if a.numel()
    )


def largest(values: Iterable[float]) -> float:
    """Return the maximum, NaN if any value is NaN; 0 of no values."""
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers, default=0.0)


def largest_finite(tensor: torch.Tensor) -> float:
    """Return the largest absolute value among the finite elements; 0 where there are none."""
    finite = tensor.detach()[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def columns(expected: torch.Tensor, got: torch.Tensor) -> Iterator[Pair]:
    """Yield two batches of outputs a few columns at a time, with all rows."""
    if expected.numel():
        rows = len(expected) if expected.dim() else 1
        width = max(AT_ONCE // rows, 1)
        parts = (torch.split(t.reshape(rows, -1), width, 1) for t in (expected, got))
        yield from zip(*parts, strict=True)


def measured(expected: torch.Tensor, got: torch.Tensor) -> Pair:
    """Return two tensors in float64, with zeros where both are the same infinity or both NaN."""
    equal = equally_not_finite(expected, got)
    return expected.double().masked_fill(equal, 0), got.double().masked_fill(equal, 0)


def equally_not_finite(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return where two tensors of one shape hold the same infinity, or both NaN."""
    return ~expected.isfinite() & ((expected == got) | (expected.isnan() & got.isnan()))


def _parts(expected: torch.Tensor, got: torch.Tensor) -> Iterator[Pair]:
    """Yield two tensors of the same shape a few elements at a time, on the CPU."""
    flat = (torch.split(t.detach().cpu().flatten(), AT_ONCE) for t in (expected, got))
    yield from zip(*flat, strict=True)
