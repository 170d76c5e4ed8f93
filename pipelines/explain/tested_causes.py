"""Tests of causes on a refused stage, and the repairs that they name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.pipelines.results.explanation import FoundCause

if TYPE_CHECKING:
    from compress.core.diagnosis.cause import Cause, RefusedStage, Repair
    from compress.pipelines.explain.finished_run import JudgedStage
    from compress.pipelines.results.explanation import Explanation

LEAST_RETURNED = 0.1
"""Share of the loss that must return without a cause; with less, the cause is not named."""


@dataclass(frozen=True)
class Explained:
    """A verdict with its explanation, and the repairs that its causes name, cheapest first."""

    judged: JudgedStage
    explanation: Explanation
    repairs: tuple[Repair, ...]


def check_cause(cause: Cause[Any], refused: RefusedStage[Any]) -> FoundCause | None:
    """Test a cause on the guilty layers; None where no value is above the threshold."""
    measured = {layer: cause.measure(refused, layer) for layer in (*refused.layers, "")}
    values = {n: value for n, value in measured.items() if value is not None}
    above = {n: value for n, value in values.items() if value > cause.limit}
    if not above:
        return None
    returned = cause.returned(refused, [n for n in above if n] or refused.layers)
    if returned is not None and returned < LEAST_RETURNED:
        return None
    worst = dict(sorted(above.items(), key=lambda item: -item[1]))
    return FoundCause(
        cause=cause.key,
        layers={layer: float(f"{value:.4g}") for layer, value in worst.items()},
        limit=cause.limit,
        returned=None if returned is None else round(returned, 4),
        text=cause.in_words(next(iter(worst.values()))),
    )
