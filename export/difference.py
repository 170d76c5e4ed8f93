"""How far a tensor is from another: in float64, a part at a time, as large answers are many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE = 2**20
"""Elements that are compared at a time."""

Pair = tuple[torch.Tensor, torch.Tensor]


def relative_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the norm of the difference over that of what is expected; equal infinities are equal.

    Infinite where shapes differ, or one is a number and the other none.
    """
    if expected.shape != got.shape:
        return float("inf")
    error = norm = 0.0
    parts = (torch.split(t.detach().cpu().flatten(), AT_ONCE) for t in (expected, got))
    for pair in zip(*parts, strict=True):
        a, b = measured(*pair)
        if not (a.isfinite().all() and b.isfinite().all()):
            return float("inf")
        error += float((b - a).square_().sum())
        norm += float(a.square().sum())
    return float(error**0.5 / max(norm**0.5, 1e-9))


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
