"""At which latencies a search looks for its next model."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from compress.pipelines.auto.front import Front

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from compress.pipelines.auto.candidates import CheckedModel

CHECKS_AT_LIMIT = 5
"""Models that are checked at the asked latency before other latencies are looked at."""
NARROW = 1.03
"""Ratio of two latencies between which no further model is looked for."""
BEHIND_BAD = 0.5
"""Weight of a gap of latencies whose slower end loses too much."""
ROOM = 0.99
"""Share of the asked latency that the solver aims at until a model keeps to it, as half of all
models are slower than predicted. From then on it aims at all of it: the best one may be predicted
at the very limit."""


def latency_targets(
    checked: Sequence[CheckedModel],
    is_good: Callable[[CheckedModel], bool],
    asked_ms: float | None,
    smallest_ms: float,
) -> list[float]:
    """Return the predicted latencies to look for models at, the most wanted first.

    Args:
        checked: models that were checked.
        is_good: whether one meets all limits but that of latency.
        asked_ms: limit of latency, if there is one.
        smallest_ms: latency of the fastest model that there is.
    """
    found = sorted(checked, key=lambda model: model.latency_ms)
    targets = []
    if asked_ms is not None:
        near = [m for m in found if m.predicted_ms and m.latency_ms <= 1.1 * asked_ms]
        if len(near) < CHECKS_AT_LIMIT:
            targets.append(aimed_at(found, asked_ms))
    good = [model for model in found if is_good(model)]
    # A metric on some hundred samples has steps, and a model that loses a sample too many may
    # have a faster neighbour that does not: so wherever nothing was checked yet, and most
    # where the slower end of a gap is good.
    fastest = good[0].latency_ms if good else math.inf
    faster = [model for model in found if model.latency_ms <= fastest]
    below = [(smallest_ms, False)]
    below += [(model.latency_ms, is_good(model)) for model in faster]
    targets += _middles(
        (a, b, 1.0 if is_good_end else BEHIND_BAD) for (a, _), (b, is_good_end) in pairwise(below)
    )
    # Then where the front is thinnest.
    front = [model.latency_ms for model in Front.pareto(good)]
    return targets + _middles((a, b, 1.0) for a, b in pairwise(front))


def aimed_at(checked: Iterable[CheckedModel], asked_ms: float) -> float:
    """Return the predicted latency that models for an asked one are solved for."""
    keeps_to_it = any(m.predicted_ms and m.latency_ms <= asked_ms for m in checked)
    return asked_ms if keeps_to_it else ROOM * asked_ms


def _middles(gaps: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return the middle of each gap between two latencies that is not narrow, the widest first.

    A gap is a lower and an upper end, and the weight of its width.
    """
    wide = [(weight * math.log(b / a), a, b) for a, b, weight in gaps if b / a > NARROW]
    return [math.sqrt(a * b) for _, a, b in sorted(wide, reverse=True)]
