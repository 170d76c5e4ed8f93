"""A run that has ended: its report, its pipeline, and the artifacts in its store."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.sealed_json import read_sealed
from compress.core.diagnosis.cause import AGREEMENT_GATES, EXPLAINED_GATES, is_explained
from compress.core.gates.disagreement import AnswerAgreement, MaxDisagreement
from compress.core.gates.quality import paired_outputs, shares_of
from compress.core.metrics import Metric
from compress.core.metrics.builtin import Fidelity
from compress.core.verdict import Verdict
from compress.export.parity.report import FOLDER, REPORT
from compress.pipelines.api import Pipeline
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.results.explanation import StageShare
from compress.pipelines.results.schema import FailureReport, Report, StageReport
from compress.pipelines.runner.run import preview_state

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.core.progress import Progress
    from compress.pipelines.runner.run_state import RunState


@dataclass(frozen=True)
class JudgedStage:
    """A stage and one of its verdicts, or an export whose own check of its outputs failed."""

    report: StageReport | FailureReport
    verdict: Verdict


@dataclass
class FinishedRun:
    """What a run has left in its folder."""

    out: Path
    report: Report
    pipeline: Pipeline
    state: RunState
    actions: dict[str, str]
    """Stage → what a run would do with it now: nothing, as it is cached, or make it, and why."""

    @classmethod
    def open(cls, out: Path, progress: Progress) -> Self:
        """Open a run; ArtifactInvalid without a report, PipelineInvalid without a pipeline file."""
        report = Report.read(out)
        command = shlex.split(str(report.lock.get("command", "")))
        if command[:2] != ["compress", "run"]:
            raise PipelineInvalid(
                f"{out}: the run was not made from a pipeline file that is still there "
                f"({report.lock.get('file')}); run the file again"
            )
        pipeline = Pipeline.from_yaml(command[2])
        options = RunOptions(judge=report.judged, progress=progress)
        actions, state = preview_state(pipeline, out, options)
        return cls(out, report, pipeline, state, actions)

    def with_pipeline(self, pipeline: Pipeline, out: Path) -> FinishedRun:
        """Return the run of a changed pipeline in another folder, with the same store."""
        store, progress = self.out / ".store", self.state.progress
        options = RunOptions(cache=store, judge=self.report.judged, progress=progress)
        actions, state = preview_state(pipeline, out, options)
        return FinishedRun(out, Report.read(out), pipeline, state, actions)

    def judged(self, stage: str | None, gate: str | None) -> list[JudgedStage]:
        """Return the verdicts that are named, else all that refused, or raise PipelineInvalid."""
        every = [JudgedStage(s, v) for s in self.report.stages for v in s.verdicts]
        every += self._wrong_exports()
        named = [
            j for j in every if stage in (None, j.report.name) and gate in (None, j.verdict.gate)
        ]
        # One that passed is explained where it is named.
        found = [j for j in named if not j.verdict.passed] or (named if stage or gate else [])
        if not found:
            known = ", ".join(f"{j.report.name}/{j.verdict.gate}" for j in every) or "none"
            problem = "no such gate was judged" if stage or gate else "no gate refused"
            raise PipelineInvalid(
                f"{self.out}: {problem}; name one that passed by --stage and --gate ({known})"
            )
        explained = [j for j in found if is_explained(j.verdict)]
        if not explained:
            names = ", ".join(sorted({j.verdict.gate + j.verdict.located for j in found}))
            raise PipelineInvalid(
                f"{self.out}: {names} is not explained; expected one of "
                f"{', '.join(EXPLAINED_GATES)}, measured here"
            )
        return explained

    def _wrong_exports(self) -> Iterator[JudgedStage]:
        """Yield the exports that failed because their outputs are not their source's."""
        for failure in self.report.failures:
            try:
                content = read_sealed(self.out / FOLDER / failure.name / REPORT, dict[str, Any])
                kinds = [float(kind.get("relative", "nan")) for kind in content["kinds"]]
                limit = float(content["limit"])
            except (ArtifactInvalid, OSError, ValueError, KeyError, TypeError):
                continue  # another failure
            error = max((k for k in kinds if math.isfinite(k)), default=None)
            verdict = Verdict(
                gate="parity",
                value=error,
                limit=limit,
                passed=False,
                against="input",
                rule=f"error of outputs, relative to their norm, <= {limit:.2g}",
                reason="" if error is not None else content["problem"],
            )
            yield JudgedStage(failure, verdict)

    def chain(self, judged: JudgedStage) -> list[str]:
        """Return the names of the artifacts from what a gate compares with to its stage."""
        names = [*judged.report.branch, judged.report.name]
        against = judged.verdict.against
        if against in (None, "input"):
            # A metric's least value is compared with nothing, so any stage may have lost it.
            return names if judged.verdict.gate == "min_metric" else names[-2:]
        return names[names.index(against) :] if against in names else names

    def context(self, name: str, judged: JudgedStage, root: Path) -> Context:
        """Return what a stage is measured in; ArtifactInvalid if that is gone or has changed."""
        planned = self.state.plan.stage(name)
        failed = {failure.name for failure in self.report.failures}
        own = () if name in failed else (name,)
        missing = [n for n in (*planned.reads, *own) if n not in self.state.artifacts]
        made = self.state.artifacts
        changed = [
            stage.name
            for stage in self.report.stages
            if stage.name in {*own, planned.input} - {*missing}
            and made[stage.name].digest != stage.artifact.digest
        ]
        if missing or changed:
            raise self._changed(missing or changed)
        context = self.state.context(name, root)
        if judged.verdict.gate not in AGREEMENT_GATES:
            return context
        # The metrics of these gates compare with the artifact of that name.
        before = self.state.artifacts[self.chain(judged)[0]]
        gates = self.state.plan.stage(judged.report.name).stage.gates
        rule, shares = judged.verdict.rule, frozenset[int]()
        bounded = [g for g in gates if isinstance(g, MaxDisagreement) and g.rule == rule]
        if not bounded or bounded[0].reads_labels(context):
            # `max_disagreement` reads all of `val` where a run judges quickly, too.
            read = replace(context, is_quick=False) if bounded else context
            shares = shares_of(paired_outputs(before, before, read), read)
        metric: Metric = Fidelity("fidelity", shares=shares)
        for gate in bounded:
            metric = AnswerAgreement("fidelity", gate=gate, context=context, shares=shares)
        return replace(context, metric=metric, artifacts={**context.artifacts, SOURCE: before})

    def _changed(self, names: Sequence[str]) -> ArtifactInvalid:
        """Return the error that artifacts of the run are not those that the file makes now."""
        made = [f"{name} {does}" for name, does in self.actions.items() if does.startswith("runs")]
        why = f" (now {made[0]})" if made else ""
        return ArtifactInvalid(
            f"{self.out}: {', '.join(names)} would be made anew: the pipeline file, the data or "
            f"the code have changed since the run{why}; run it again: "
            f"{self.report.lock.get('command')}"
        )

    def split(self, judged: JudgedStage) -> tuple[StageShare, ...]:
        """Return by how many points each stage of the chain changes the metric on `val`."""
        chain, metric = self.chain(judged), self.state.plan.metric
        verdict = judged.verdict
        if verdict.gate in AGREEMENT_GATES and verdict.value is not None:
            metric, values = Metric("fidelity"), [1.0]  # or another share of samples
            for name in chain[1:-1]:
                context = self.context(name, judged, self.out / "work")
                values.append(context.score(self.state.artifacts[name]))
            # The verdict has it of the refused stage.
            values.append(1 - verdict.bound.measured / 100 if verdict.bound else verdict.value)
        else:
            values = [self._score(name) for name in chain]
        return tuple(
            StageShare(stage=name, points=round(metric.drop_points(before, after), 6))
            for name, before, after in zip(chain[1:], values, values[1:], strict=False)
        )

    def max_points(self, judged: JudgedStage) -> float:
        """Return how many points the gate allows between the ends of the chain."""
        verdict, metric, first = judged.verdict, self.state.plan.metric, self.chain(judged)[0]
        match verdict.gate:
            case "label_agreement":
                return 100 * (1 - verdict.limit)
            case "max_disagreement" if verdict.bound:  # which is above what was measured
                return max(0.0, verdict.limit - (verdict.bound.value - verdict.bound.measured))
            case "max_relative_drop":
                return verdict.limit * abs(self._score(first))
            case "min_metric":
                return metric.drop_points(self._score(first), verdict.limit)
        return verdict.limit

    def _score(self, name: str) -> float:
        known = {stage.name: stage.measurements for stage in self.report.stages}
        measured = {self.report.baseline_name: self.report.baseline, **known}.get(name)
        if measured is not None and measured.metric is not None:
            return float(measured.metric.value)
        if name not in self.state.artifacts:
            raise self._changed([name])
        context = self.state.context(self.report.stages[-1].name, self.out / "work")
        return context.score(self.state.artifacts[name])
