"""At which latencies a search looks for its next model."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from pipelines.auto.front import Front

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipelines.auto.candidates import CheckedModel
    from pipelines.auto.search_state import SearchState

MAX_CHECKS_AT_LIMIT = 5
"""Models that are checked at the asked latency before other latencies are looked at."""
NARROW_GAP = 1.03
"""Ratio of two latencies between which no further model is looked for."""
WEIGHT_BEHIND_BAD = 0.5
"""Weight of a gap of latencies whose slower end loses too much."""
AIMED_SHARE = 0.99
"""Share of the asked latency that the solver aims at until a model keeps to it, as half of all
models are slower than predicted. From then on it aims at all of it: the best one may be predicted
at the very limit."""


def latency_targets(state: SearchState) -> list[float]:
    """Return the predicted latencies to look for models at, the most wanted first."""
    asked_ms = state.asked_ms
    found = sorted(state.offered(), key=lambda model: model.latency_ms)
    targets = []
    if asked_ms is not None:
        near = [m for m in found if m.predicted_ms and m.latency_ms <= 1.1 * asked_ms]
        if len(near) < MAX_CHECKS_AT_LIMIT:
            targets.append(aimed_at(found, asked_ms))
    good = [model for model in found if state.is_good(model)]
    # A metric on some hundred samples has steps, and a model that loses a sample too many may
    # have a faster neighbour that does not: so wherever nothing was checked yet, and most
    # where the slower end of a gap is good.
    fastest = good[0].latency_ms if good else math.inf
    faster = [model for model in found if model.latency_ms <= fastest]
    below = [(state.smallest_ms(), False)]
    below += [(model.latency_ms, state.is_good(model)) for model in faster]
    targets += _middles(
        (a, b, 1.0 if is_good_end else WEIGHT_BEHIND_BAD)
        for (a, _), (b, is_good_end) in pairwise(below)
    )
    # Then where the front is thinnest.
    front = [model.latency_ms for model in Front.pareto(good)]
    return targets + _middles((a, b, 1.0) for a, b in pairwise(front))


def aimed_at(checked: Iterable[CheckedModel], asked_ms: float) -> float:
    """Return the predicted latency that models for an asked one are solved for."""
    keeps_to_it = any(m.predicted_ms and m.latency_ms <= asked_ms for m in checked)
    return asked_ms if keeps_to_it else AIMED_SHARE * asked_ms


def _middles(gaps: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return the middle of each gap between two latencies that is not narrow, the widest first.

    A gap is a lower and an upper end, and the weight of its width.
    """
    wide = [(weight * math.log(b / a), a, b) for a, b, weight in gaps if b / a > NARROW_GAP]
    return [math.sqrt(a * b) for _, a, b in sorted(wide, reverse=True)]
