"""All announced causes, and their tests on a refused stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from compress.common.errors import Unavailable
from compress.common.requirements import announced_entries, is_foreign, load_entry_point
from compress.core.diagnosis import layer_diagnosis
from compress.core.diagnosis.cause import ENTRY_POINT_GROUP, Cause, RefusedStage, Repair
from compress.pipelines.results.explanation import Explanation, FoundCause
from compress.pipelines.system.jsonl_log import log_event

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.diagnosis.layer_diagnosis import LayerDiagnosis
    from compress.core.stage import Stage
    from compress.pipelines.explain.finished_run import JudgedStage

LEAST_RETURNED = 0.1
"""Share of the loss that must return without a cause; with less, the cause is not named."""
NO_CAUSE = "no test of a cause is above its threshold"

Found = tuple[dict[str, Any], Sequence[Repair]]
"""What an explanation has besides the verdict, and the repairs that its causes name."""


@dataclass(frozen=True)
class Explained:
    """A verdict with its explanation, and the repairs that its causes name, cheapest first."""

    judged: JudgedStage
    explanation: Explanation
    repairs: tuple[Repair, ...]


@cache
def announced_causes() -> dict[str, tuple[Cause, bool]]:
    """Return key → cause, and whether a foreign package adds it; Unavailable if two clash."""
    known: dict[str, tuple[Cause, bool]] = {}
    for entry in announced_entries(ENTRY_POINT_GROUP, "cause"):
        table = load_entry_point(entry, "cause")
        for cause in (table,) if isinstance(table, Cause) else table:
            if cause.key in known:
                raise Unavailable(f"cause {entry.name!r} of {entry.value}: the name is taken")
            known[cause.key] = cause, is_foreign(entry)
    return known


def causes_of(stage: str, gate: str) -> list[Cause]:
    """Return the causes that are tested on a kind of stage where a gate refused."""
    every = (cause for cause, _ in announced_causes().values())
    return [cause for cause in every if stage in cause.stages and gate in cause.gates]


def diagnose(
    stage: Stage[Any, Any], before: Any, after: Artifact, context: Context, allowed: float
) -> LayerDiagnosis | None:
    """Return the diagnosis of what a stage made; None where no part of it can be put back."""
    for entry in announced_entries(layer_diagnosis.ENTRY_POINT_GROUP, "diagnosis"):
        if entry.name == stage.stage:
            kind: type[LayerDiagnosis] = load_entry_point(entry, "diagnosis")
            return kind(stage, before, after, context, allowed)
    return None


def check_cause(cause: Cause, refused: RefusedStage[Any]) -> FoundCause | None:
    """Test a cause on the guilty layers; None where no value is above the threshold."""
    measured = {layer: cause.measure(refused, layer) for layer in (*refused.layers, "")}
    above = {n: value for n, value in measured.items() if value is not None and value > cause.limit}
    if not above:
        return None
    share = cause.recovered_share(refused, [n for n in above if n] or refused.layers)
    if share is not None and share < LEAST_RETURNED:
        return None
    return found_cause(cause, above, None if share is None else round(share, 4))


def found_cause(cause: Cause, values: Mapping[str, float], returned: float | None) -> FoundCause:
    """Return a cause with the values of layers that are above its threshold, the worst first."""
    worst = dict(sorted(values.items(), key=lambda item: -item[1]))
    return FoundCause(
        cause=cause.key,
        layers={layer: float(f"{value:.4g}") for layer, value in worst.items()},
        limit=cause.limit,
        returned=returned,
        text=cause.in_words(next(iter(worst.values()))),
    )


Checked = list[tuple[Cause, FoundCause]]


def check_causes(refused: RefusedStage[Any], gate: str) -> Checked:
    """Return the causes of a stage above their thresholds, the likeliest first."""
    tested = [(c, check_cause(c, refused)) for c in causes_of(refused.stage.stage, gate)]
    found = [(cause, result) for cause, result in tested if result is not None]
    # Equal ones in their own order: a twentieth of the loss is some samples.
    return sorted(found, key=lambda pair: -likelihood(pair[1]))


def likelihood(found: FoundCause) -> int:
    """Return the share that returns, in twentieths; less is chance."""
    return round(20 * (found.returned or 0.0))


def log_causes(found: Checked, stage: str) -> None:
    """Write causes to the run's log."""
    for cause, result in found:
        log_event("cause_found", f"{stage}: {result.text}", stage=stage, cause=cause.key)


def cheapest_first(
    found: Sequence[tuple[Cause, Sequence[str]]], refused: RefusedStage[Any]
) -> dict[str, Repair]:
    """Return what causes of some layers name, without doubles, the cheapest first."""
    repairs: dict[str, Repair] = {}
    for cause, layers in found:
        for repair in cause.repairs(refused, layers):
            repairs.setdefault(str(sorted(repair.settings.items())), repair)
    return dict(sorted(repairs.items(), key=lambda item: item[1].cost))
