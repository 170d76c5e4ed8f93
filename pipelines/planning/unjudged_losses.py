"""Losses of the metric that no gate judges: foreseen in a plan, and found in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.core.gates import LabelAgreement, MaxDrop, MinMetric, Parity
from pipelines.config.model_spec import SOURCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from compress.core.metrics import Metric
    from pipelines.planning.plan import Plan, PlannedStage

MOST_POINTS = 1.0
"""That a metric from 0 to 1 may lose before a run warns of it."""
MOST_SHARE = 0.02
"""Of its value that any other metric may."""
SAME_NUMBERS = ("train", "export_", "package_")
"""Beginnings of stages that are no compression: exporters compare their file with its source."""


def stages_without_gate(stages: Sequence[PlannedStage]) -> tuple[str, ...]:
    """Return the names of stages whose loss of accuracy no gate judges, their own or a later one.

    A gate judges a stage where it looks at the metric alone, or compares the stage's result, or
    what is made of it, with something that the stage has not touched.
    """
    return tuple(s.name for s in stages if not any(_judge(gated, s, stages) for gated in stages))


def advice(plan: Plan) -> tuple[str, ...]:
    """Return a line that advises a gate, where compression is judged by none."""
    unjudged = {*stages_without_gate(plan.stages)}
    for planned in plan.stages:
        if planned.stage.stage.startswith(SAME_NUMBERS):
            unjudged.discard(planned.name)
    if not unjudged:
        return ()
    names = ", ".join(plan.ordered(unjudged))
    last = [leaf for leaf in plan.leaves if unjudged & {leaf, *plan.branch(leaf)}]
    return (
        f"no gate judges what {names} may cost in accuracy; add gates: "
        f"[{{gate: max_drop, points: 1, against: {plan.baseline}}}] to {', '.join(last)}",
    )


def _judge(gated: PlannedStage, judged: PlannedStage, stages: Sequence[PlannedStage]) -> bool:
    """Whether a gate of one stage judges what another one, at or before it, did to accuracy."""
    by_name = {stage.name: stage for stage in stages}
    since, at = {gated.name}, gated
    while at.name != judged.name:
        if at.input not in by_name:
            return False  # it is on another branch
        at = by_name[at.input]
        since.add(at.name)
    return any(
        isinstance(gate, MinMetric)
        or (
            isinstance(gate, MaxDrop | LabelAgreement | Parity)
            and (gate.against or gated.input) not in since
        )
        for gate in gated.stage.gates
    )


@dataclass(frozen=True)
class Fall:
    """A stage that made the metric much worse."""

    stage: str
    since: str
    """Name of what it is compared with."""
    before: float
    after: float
    is_judged: bool
    """Whether a gate judges it."""

    def line(self, metric: Metric, cause: str) -> str:
        """Return a warning of it, with how to mend it.

        Args:
            metric: the metric.
            cause: the likely one, in words; empty where nothing is known.
        """
        if _is_share(metric, self.before, self.after):
            much = f"{metric.drop_points(self.before, self.after):.3g} points"
        else:
            much = f"{100 * _share_lost(metric, self.before, self.after):.3g} %"
        why = f"; {cause}" if cause else ""
        mend = "" if self.is_judged else ", which no gate judges (add {gate: max_drop, points: …})"
        return (
            f"{self.stage}: {metric.name} is {much} worse than that of {self.since} "
            f"({self.before:.4f} → {self.after:.4f}){mend}{why}"
        )


def falls(plan: Plan, metric: Metric, values: Mapping[str, float]) -> Iterator[Fall]:
    """Yield what made the metric much worse: by itself, or with others since the baseline.

    Losses together are told where no gate judges any of them: one that does has allowed its own.

    Args:
        plan: the plan.
        metric: the metric.
        values: its value by stage, as far as it was measured.
    """
    unjudged = {*stages_without_gate(plan.stages)}
    found: set[str] = set()
    for stage in plan.stages:
        if stage.name not in values or stage.name == plan.baseline:
            continue
        since = stage.input if stage.input in values else plan.baseline
        road = {*plan.branch(stage.name), stage.name} - {SOURCE, plan.baseline}
        if is_much(metric, values[since], values[stage.name]):
            found.add(stage.name)
        elif road <= unjudged - found and is_much(
            metric, values[plan.baseline], values[stage.name]
        ):
            found.add(stage.name)
            since = plan.baseline
        else:
            continue
        before, after = values[since], values[stage.name]
        yield Fall(stage.name, since, before, after, is_judged=stage.name not in unjudged)


def is_much(metric: Metric, before: float, after: float) -> bool:
    """Whether a metric became worse by more than a point, or by more than 2 % of its value."""
    if _is_share(metric, before, after):
        return round(metric.drop_points(before, after), 9) > MOST_POINTS
    return _share_lost(metric, before, after) > MOST_SHARE


def _is_share(metric: Metric, before: float, after: float) -> bool:
    """Whether a metric is one like accuracy, from 0 to 1."""
    return metric.higher_is_better and min(before, after) >= 0 and max(before, after) <= 1


def _share_lost(metric: Metric, before: float, after: float) -> float:
    return round(metric.drop_points(before, after) / 100 / max(abs(before), 1e-12), 9)
