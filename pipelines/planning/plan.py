"""The stages that a run executes, in order, as plain data, and what they lose unjudged."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.pipelines.config.model_spec import SOURCE

if TYPE_CHECKING:
    from compress.core.gates.gate import Gate
    from compress.core.metrics import Metric
    from compress.core.objectives.loss import Loss
    from compress.core.objectives.task import Task
    from compress.core.stage import Stage

MAX_POINTS_LOST = 1.0  # percentage points that a metric from 0 to 1 may lose without a warning
MAX_SHARE_LOST = 0.02  # share of its value that any other metric may lose without a warning
UNCOMPRESSING_STAGES = ("train", "export_", "package_")
"""Prefixes of stages that do not compress; exporters compare their file with its source anyway."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage with its name and the names of the artifacts that it reads."""

    index: int
    """Position in the pipeline file, with each matrix expanded."""
    name: str
    input: str
    stage: Stage[Any, Any]
    compared: tuple[str, ...]
    """Names of the artifacts that its gates compare with."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all artifacts that the stage reads, its input first."""
        return (self.input, *self.stage.extra_inputs)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of all artifacts that running the stage and evaluating its gates takes."""
        return tuple(dict.fromkeys((*self.reads, *self.compared)))


@dataclass(frozen=True)
class Plan:
    """A checked order of stages, with the loss and the metric that apply to all of them."""

    stages: tuple[PlannedStage, ...]
    loss: Loss
    metric: Metric
    task_reason: str
    """What the task was inferred from, such as `as loss is mse`; empty where the file names it."""
    warnings: tuple[str, ...]
    """What will stop a later stage, while those before it can run."""
    baseline: str
    """What measurements compare with: the result of a leading `train` stage, else the source."""
    again: frozenset[str]
    """Names of the stages that run whatever the store holds."""
    cut: bool
    """Whether stages of the pipeline are left out."""

    @property
    def task(self) -> Task | None:
        """What the model is for, where it is known."""
        return self.loss.task

    @property
    def task_line(self) -> str:
        """The task and what it was inferred from; empty where the file names it."""
        task, reason = self.task, self.task_reason
        return f"task: {task.name}, {reason}" if task and reason else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages in their order."""
        return tuple(p.name for p in self.stages)

    def stage(self, name: str) -> PlannedStage:
        """Return the stage of a name."""
        return self.stages[self.names.index(name)]

    def needs(self, name: str) -> tuple[str, ...]:
        """Return the names of all artifacts that a stage and its gates need; none for `source`."""
        return () if name == SOURCE else self.stage(name).needs

    def ordered(self, names: Container[str]) -> tuple[str, ...]:
        """Return the known stage names among `names`, in pipeline order, `source` first."""
        return tuple(name for name in (SOURCE, *self.names) if name in names)

    def branch(self, name: str) -> tuple[str, ...]:
        """Return the names of a stage's ancestors by input, from `source` to its input."""
        ancestors: list[str] = []
        while name != SOURCE:
            name = self.stage(name).input
            ancestors.insert(0, name)
        return tuple(ancestors)

    @property
    def route(self) -> str:
        """The names of the stages in their order, for people."""
        return " → ".join(self.names)

    @property
    def leaves(self) -> tuple[str, ...]:
        """Stages whose artifact no other stage reads: what is deployed."""
        read = {name for p in self.stages for name in p.reads}
        return tuple(p.name for p in self.stages if p.name not in read)


def stages_without_gate(stages: Sequence[PlannedStage]) -> tuple[str, ...]:
    """Return the names of stages whose accuracy drop no gate checks, of theirs or a later stage."""
    return tuple(s.name for s in stages if not any(g.judges_quality for g in _gates_on(s, stages)))


def advice(plan: Plan) -> tuple[str, ...]:
    """Advise a gate, which the pipeline can have, if none checks what compression costs."""
    unjudged = {*stages_without_gate(plan.stages)}
    for planned in plan.stages:
        if planned.stage.stage.startswith(UNCOMPRESSING_STAGES):
            unjudged.discard(planned.name)
    if not unjudged:
        return ()
    names = ", ".join(plan.ordered(unjudged))
    last = [leaf for leaf in plan.leaves if unjudged & {leaf, *plan.branch(leaf)}]
    no_metric, gate = "", "max_drop, points: 1"
    if not plan.metric.is_measured:
        no_metric, gate = ", and there is no metric", "parity, atol: …"
    return (
        f"no gate judges what {names} may cost in accuracy{no_metric}; add gates: "
        f"[{{gate: {gate}, against: {plan.baseline}}}] to {', '.join(last)}",
    )


def _gates_on(checked: PlannedStage, stages: Sequence[PlannedStage]) -> Iterator[Gate]:
    """Yield gates on a stage or later ones: on the result alone, or against what was before it."""
    by_name = {stage.name: stage for stage in stages}
    for gated in stages:
        since, at = {gated.name}, gated
        while at.name != checked.name and at.input in by_name:
            at = by_name[at.input]
            since.add(at.name)
        if at.name == checked.name:  # else it is on another branch
            for gate in gated.stage.gates:
                own = "" if gate.of_uncompressed else gated.input
                if not (gate.compares and (gate.against or own) in since):
                    yield gate


def reads_all_outputs(plan: Plan, stage: PlannedStage) -> bool:
    """Whether the loss it trains with, the metric, or its or a later gate reads every output."""
    return (
        plan.metric.reads_all_outputs
        or (plan.loss.is_custom and stage.stage.uses_loss)
        or any(gate.reads_all_outputs for gate in _gates_on(stage, plan.stages))
    )


@dataclass(frozen=True)
class AccuracyDrop:
    """A stage after which the metric is much worse."""

    stage: str
    since: str
    """Name of the artifact that it is compared with."""
    before: float
    after: float
    is_judged: bool
    """Whether a gate checks it."""

    def line(self, metric: Metric, cause: str) -> str:
        """Return a warning with its likely cause, if one is known, and how to mend it."""
        before, after = self.before, self.after
        much = f"{100 * _share_lost(metric, before, after):.3g} %"
        if _is_share(metric, before, after):
            much = f"{metric.drop_points(before, after):.3g} points"
        why = f"; {cause}" if cause else ""
        mend = "" if self.is_judged else ", which no gate judges (add {gate: max_drop, points: …})"
        return (
            f"{self.stage}: {metric.name} is {much} worse than that of {self.since} "
            f"({before:.4f} → {after:.4f}){mend}{why}"
        )


def accuracy_drops(
    plan: Plan, metric: Metric, values: Mapping[str, float]
) -> Iterator[AccuracyDrop]:
    """Yield the stages that made the metric much worse, alone or together with earlier ones.

    Drops add up only over stages that no gate checks: a gate has accepted the drop of its stage.
    `values` has the metric by stage, as far as it was measured.
    """
    unjudged = {*stages_without_gate(plan.stages)}
    reported: set[str] = set()
    for stage in plan.stages:
        if stage.name not in values or stage.name == plan.baseline:
            continue
        after, path = values[stage.name], {*plan.branch(stage.name), stage.name}
        compared = [stage.input if stage.input in values else plan.baseline]
        if path - {SOURCE, plan.baseline} <= unjudged - reported:
            compared.append(plan.baseline)
        for since in compared:
            if is_much(metric, values[since], after):
                reported.add(stage.name)
                is_judged = stage.name not in unjudged
                yield AccuracyDrop(stage.name, since, values[since], after, is_judged)
                break


def is_much(metric: Metric, before: float, after: float) -> bool:
    """Whether a metric fell by more than a point, or by more than 2 % if it is not from 0 to 1."""
    if _is_share(metric, before, after):
        # Rounded: 0.9 - 0.89 is a little more than a point in binary.
        return round(metric.drop_points(before, after), 9) > MAX_POINTS_LOST
    return _share_lost(metric, before, after) > MAX_SHARE_LOST


def _is_share(metric: Metric, before: float, after: float) -> bool:
    """Whether a metric is like accuracy, from 0 to 1."""
    return metric.higher_is_better and min(before, after) >= 0 and max(before, after) <= 1


def _share_lost(metric: Metric, before: float, after: float) -> float:
    # 1e-12: the value before may be 0.
    return round(metric.drop_points(before, after) / 100 / max(abs(before), 1e-12), 9)
