"""How far tensors are from those expected, in float64; no NaN is ever taken for a small difference.

Python's ``max(0.0, nan)`` is 0.0 and ``nan > limit`` is False, so a comparison written by hand lets
NaN through. Everything that compares two models' answers measures with these functions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

AT_ONCE = 2**20
"""Elements that are compared at a time: answers in float64 take memory."""

Pair = tuple[torch.Tensor, torch.Tensor]


def relative_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is expected; equal infinities are equal.

    Infinite where shapes differ, or one is a number and the other none.
    """
    if expected.shape != got.shape:
        return math.inf
    error = norm = 0.0
    for a, b in _parts(expected, got):
        a, b = measured(a, b)
        if not (a.isfinite().all() and b.isfinite().all()):
            return math.inf
        error += float((b - a).square_().sum())
        norm += float(a.square().sum())
    return float(error**0.5 / max(norm**0.5, 1e-9))


def largest_difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest absolute difference of two elements; 0 where there are none.

    Equal infinities, as of masked scores, are equal. NaN where either tensor holds a NaN; infinite
    where shapes differ.
    """
    if expected.shape != got.shape:
        return math.inf
    return largest(
        float((b.double() - a.double()).abs().masked_fill_(a == b, 0).max())
        for a, b in _parts(expected, got)
        if a.numel()
    )


def largest(values: Iterable[float]) -> float:
    """Return the largest of some numbers, NaN where one is; 0 where there are none."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def largest_finite(tensor: torch.Tensor) -> float:
    """Return the largest absolute value among the finite elements; 0 where there are none."""
    finite = tensor.detach()[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def identical(expected: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether two tensors have one shape and the same elements; NaN is the same as NaN."""
    return expected.shape == got.shape and bool(
        ((expected == got) | ((expected != expected) & (got != got))).all()
    )


def columns(expected: torch.Tensor, got: torch.Tensor) -> Iterator[Pair]:
    """Yield two batches of answers a few columns at a time, all rows of them."""
    if expected.numel():
        rows = len(expected) if expected.dim() else 1
        width = max(AT_ONCE // rows, 1)
        parts = (torch.split(t.reshape(rows, -1), width, 1) for t in (expected, got))
        yield from zip(*parts, strict=True)


def measured(expected: torch.Tensor, got: torch.Tensor) -> Pair:
    """Return two tensors in float64, with zeros where both are the same infinity, or NaN."""
    equal = equally_not_finite(expected, got)
    return expected.double().masked_fill(equal, 0), got.double().masked_fill(equal, 0)


def equally_not_finite(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return where two tensors of one shape hold the same infinity, or both NaN."""
    return ~expected.isfinite() & ((expected == got) | (expected.isnan() & got.isnan()))


def _parts(expected: torch.Tensor, got: torch.Tensor) -> Iterator[Pair]:
    """Yield two tensors of one shape a few elements at a time, on the CPU."""
    flat = (torch.split(t.detach().cpu().flatten(), AT_ONCE) for t in (expected, got))
    yield from zip(*flat, strict=True)
