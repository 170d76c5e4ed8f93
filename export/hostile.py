"""Inputs that a model seldom sees, made from those it does: constants, extremes, short rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from compress.core.batching import any_batch
from compress.core.difference import relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from compress.core.artifact import Predictor
    from compress.core.signature import Signature
    from export.truth import Truth

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]

ROWS = 2
RAGGED_ROWS = 8
"""Rows of the batch whose lengths go from one element to all."""
SCALE = 10.0
"""How many times larger than the real samples the scaled ones are."""


def hostile_inputs(signature: Signature, seen: Sequence[Outputs]) -> Iterator[tuple[str, Outputs]]:
    """Yield kinds of inputs with their name; integers stay within the range that was seen.

    Args:
        signature: the model's interface; masks keep rows that are not wholly masked.
        seen: batches of real inputs; seeded ones where there are none.
    """
    seen = [batch for batch in seen if len(batch[0])] or [signature.example()]
    rows = _rows(signature, RAGGED_ROWS if _masks(signature) else ROWS)
    base = tuple(_repeated(x, rows) for x in seen[0])
    lowest, highest = (_extreme(seen, pick) for pick in (torch.min, torch.max))
    free = [not spec.is_mask for spec in signature.inputs]

    def filled(values: Sequence[float]) -> Outputs:
        return tuple(
            torch.full_like(x, value) if changed and x.numel() else x
            for x, value, changed in zip(base, values, free, strict=True)
        )

    zeros = [0 if low <= 0 <= high else low for low, high in zip(lowest, highest, strict=True)]
    yield "zeros", filled(zeros)
    yield "the smallest value seen everywhere", filled(lowest)
    yield "the largest value seen everywhere", filled(highest)
    if any(x.is_floating_point() for x in base):
        scaled = (x * SCALE if x.is_floating_point() else x for x in base)
        yield f"real inputs times {SCALE:g}", tuple(scaled)
    if _masks(signature):
        yield "rows of every length", _ragged(signature, base)


def check_on_hostile(
    expected: Predictor,
    got: Predictor,
    signature: Signature,
    cases: Iterator[tuple[str, Outputs]],
    limit: float,
    truth: Truth | None = None,
) -> tuple[str, Outputs, float] | None:
    """Return the first kind on which two models differ, its inputs and the error, or None.

    What the source refuses, or has no finite answer to, tells nothing. Integers that a model
    answers with are not compared here: on constants they are ties.

    Args:
        expected: the source model.
        got: the exported one.
        signature: their interface.
        cases: kinds of inputs.
        limit: largest error, relative to the norm of the answers.
        truth: what excuses a difference.
    """
    expected, mine = any_batch(expected, signature), any_batch(got, signature)
    for kind, inputs in cases:
        try:
            answers = expected(*inputs)
        except Exception:  # noqa: BLE001 - whatever the user's own code raises
            continue
        if not all(t.isfinite().all() for t in answers):
            continue
        error = _error(mine, inputs, answers)
        if error <= limit:
            continue
        if (
            truth is not None
            and error < float("inf")
            and truth.excuses(inputs, mine(*inputs), limit)
        ):
            logger.info("on %s float32 itself is %.2g of the norm off", kind, error)
            continue
        return kind, inputs, error
    return None


def _error(got: Predictor, inputs: Outputs, expected: Outputs) -> float:
    """Return the worst output's error; infinite where the model fails."""
    try:
        answers = got(*inputs)
    except Exception:  # noqa: BLE001 - each runtime raises its own
        return float("inf")
    pairs = [p for p in zip(expected, answers, strict=True) if p[0].is_floating_point()]
    return max((relative_error(a, b) for a, b in pairs), default=0.0)


def _masks(signature: Signature) -> bool:
    return any(spec.is_mask for spec in signature.inputs)


def _rows(signature: Signature, rows: int) -> int:
    size = signature.inputs[0].shape[0] if signature.inputs[0].shape else rows
    return size if isinstance(size, int) else rows


def _repeated(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows, from the start again where there are too few."""
    return x[torch.arange(rows) % len(x)] if x.dim() else x


def _extreme(seen: Sequence[Outputs], pick: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    columns = zip(*seen, strict=True)
    return [
        pick(
            torch.stack(
                [pick(x).double() for x in column if x.numel()] or [torch.zeros(()).double()]
            )
        ).item()
        for column in columns
    ]


def _ragged(signature: Signature, base: Outputs) -> Outputs:
    """Return rows whose masks let through one element, some, and all, from the left."""
    changed = []
    for spec, x in zip(signature.inputs, base, strict=True):
        if spec.is_mask and x.dim() > 1 and x.shape[-1]:
            lengths = torch.linspace(1, x.shape[-1], len(x)).round()
            shape = (len(x), *[1] * (x.dim() - 1))
            x = (torch.arange(x.shape[-1]) < lengths.view(shape)).expand(x.shape).to(x.dtype)
        changed.append(x)
    return tuple(changed)
