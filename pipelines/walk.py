"""Walking the road: each stage is reused or run, measured, judged and reported."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.core.errors import GateRefused
from compress.core.gates import explain
from compress.core.stage import Context
from pipelines.history import history_parts, run_told
from pipelines.inputs import import_source, source_parts
from pipelines.machine import machine, version_of, versions
from pipelines.naming import named
from pipelines.plan import SOURCE, Plan, PlannedStage
from pipelines.report import (
    ArtifactReport,
    FailureReport,
    Measurements,
    Report,
    StageReport,
    TestReport,
    how_to_run,
)
from pipelines.store import WORK, Entry, Record, Store, publish, unpublish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pydantic import JsonValue

    from compress.core.artifact import Artifact
    from compress.core.data import Splits
    from compress.core.gates import Gate, Verdict
    from compress.core.stage import Progress
    from pipelines.pipeline import Pipeline
    from pipelines.report import Status

ASKED = "asked to run again"


@dataclass
class Walk:
    """One run: what has been made so far."""

    pipeline: Pipeline
    plan: Plan
    out: Path
    store: Store
    data: Splits | None
    progress: Progress
    announce: Callable[[str], None]
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    rows: list[StageReport] = field(default_factory=list)
    scores: dict[tuple[Any, ...], float] = field(default_factory=dict)
    baseline: Measurements | None = None
    tested: TestReport | None = None
    at: str = ""
    """The stage that is being walked; empty between stages."""
    judging_seconds: float = 0.0
    """Spent on measuring, since the stage began to be judged."""

    def __post_init__(self) -> None:
        self.fingerprint = self.data.fingerprint() if self.data else None

    def import_model(self, again: bool) -> None:
        """Bring in the model as it is; what an earlier run published makes room."""
        self.at = SOURCE
        unpublish(self.out / "artifacts")
        self._obtain(
            SOURCE, self.source_parts(), lambda c: import_source(self.pipeline, c.root), again
        )
        publish(self.artifacts[SOURCE], self.out / "artifacts" / SOURCE)
        if self.plan.baseline == SOURCE:
            self.baseline = self._measured(SOURCE)
        self.at = ""

    def step(self, planned: PlannedStage, again: bool) -> None:
        """Reuse or run one stage, then measure and judge it.

        Raises:
            GateRefused: a gate refused.
        """
        stage = planned.stage
        self.at, self.judging_seconds = planned.name, 0.0
        cached, reason, seconds = self._obtain(
            planned.name, self.parts(planned), functools.partial(run_told, planned, self), again
        )
        artifact = self.artifacts[planned.name]
        self._prove(planned, cached)
        publish(artifact, self.out / "artifacts" / planned.name)
        with artifact.held(self.pipeline.device, self.pipeline.threads):
            verdicts = [self._judge(planned, gate) for gate in stage.gates]
            measurements = self._measured(planned.name)
        if planned.name == self.plan.baseline:
            self.baseline = measurements
        self.rows.append(
            StageReport(
                name=planned.name,
                stage=stage.stage,
                input=planned.input,
                cached=cached,
                reason=reason,
                seconds=seconds,
                judged_seconds=self.judging_seconds,
                artifact=ArtifactReport.of(artifact, f"artifacts/{planned.name}"),
                measurements=measurements,
                verdicts=tuple(verdicts),
            )
        )
        self.at = ""
        self.announce(self.rows[-1].line())
        refused = [v for v in verdicts if not v.passed]
        if refused:
            raise GateRefused(
                f"{planned.name}: {'; '.join(map(explain, refused))} "
                f"(artifact kept in {self.out / 'artifacts' / planned.name})"
            )

    def source_parts(self) -> dict[str, Any]:
        """Return everything that decides the imported model."""
        return {**source_parts(self.pipeline), **self._surroundings(uses_data=False)}

    def parts(self, planned: PlannedStage) -> dict[str, Any]:
        """Return everything that decides a stage's artifact."""
        return {
            "stage": planned.stage.stage,
            "settings": planned.stage.own_settings(),
            "inputs": {name: self.artifacts[name].digest for name in planned.reads},
            "library": version_of(type(planned.stage).__module__),
            **planned.stage.machine_parts,
            **history_parts(planned, self),
            **self._surroundings(planned.stage.uses_data),
        }

    def test(self) -> None:
        """Touch the test split, once, for what came in and what ships; not where a run is cut."""
        complete = len(self.plan.stages) == len(self.pipeline.stages)
        if self.data is None or "test" not in self.data.datasets or not complete:
            return
        question = {"metric on": "test", **self._conditions()}
        values: dict[str, float] = {}
        for name in dict.fromkeys((self.plan.baseline, *self.plan.leaves)):
            score = functools.partial(self._context(name).score, self.artifacts[name], "test")
            with named(name, self.out):
                values[name] = float(str(self.entries[name].answer(question, score)))
        self.tested = TestReport(metric=self.plan.metric.name, values=values)

    def report(self, status: Status, error: str = "") -> Report:
        """Return what happened so far."""
        return Report(
            pipeline=self.pipeline.name,
            status=status,
            error=error,
            failed_stage=self._failure(error) if self.at else None,
            baseline_name=self.plan.baseline,
            baseline=self.baseline,
            stages=tuple(self.rows),
            test=self.tested,
            lock={
                "source": self.store.last_parts(SOURCE),
                "file": self.pipeline.file,
                "command": how_to_run(self.pipeline.file, self.out),
                "versions": dict(versions()),
                "machine": dict(machine()),
                "seed": self.pipeline.seed,
                "data": self.fingerprint,
                "artifacts": {name: a.digest for name, a in self.artifacts.items()},
                "settings": self.pipeline.model_dump(mode="json", by_alias=True),
            },
        )

    def _failure(self, error: str) -> FailureReport:
        stages = {p.name: p.stage.stage for p in self.plan.stages}
        return FailureReport(name=self.at, stage=stages.get(self.at, SOURCE), error=error)

    def _ask(self, name: str, question: dict[str, Any], measure: Callable[[], JsonValue]) -> Any:
        """Return what was measured before, or measure, counting the seconds."""

        def timed() -> JsonValue:
            began = time.monotonic()
            try:
                return measure()
            finally:
                self.judging_seconds += time.monotonic() - began

        return self.entries[name].answer(question, timed)

    def _obtain(
        self,
        name: str,
        parts: dict[str, Any],
        make: Callable[[Context], Artifact],
        again: bool,
    ) -> tuple[bool, str, float]:
        """Take an artifact from the store or make it; return whether cached, why not, seconds."""
        entry = self.store.entry(parts)
        found = None if again else entry.load()
        reason = ""
        if found is None:
            reason = ASKED if again else self.store.why(name, parts)
            self.announce(f"{name}: running ({reason})")
            entry.path.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            context = self._context(name, entry.artifact_path)
            with named(name, self.out):
                artifact = make(context)
            record = Record(parts=parts, digest=artifact.digest, seconds=time.monotonic() - began)
            self.store.settle(name, entry, record)
            found = artifact, record
        artifact, record = found
        self.artifacts[name], self.entries[name] = artifact, entry
        self.store.remember(name, parts)
        return not reason, reason, record.seconds

    def _prove(self, planned: PlannedStage, cached: bool) -> None:
        """Hold a cached result against its input, once for each data and machine."""
        name, model = planned.name, self.artifacts[planned.input]

        def prove() -> JsonValue:
            if cached:  # else the stage has just done so itself
                planned.stage.prove(model, self.artifacts[name], self._context(name))
            return True

        with named(name, self.out):
            self._ask(name, {"proved against its input": 1, **self._conditions()}, prove)

    def _judge(self, planned: PlannedStage, gate: Gate) -> Verdict:
        other = gate.against or planned.input
        before, after = self.artifacts[other], self.artifacts[planned.name]
        question = {**gate.measurement_key(), "against": before.digest, **self._conditions()}
        failed: list[Verdict] = []

        def measure() -> float:
            verdict = gate.judge(before, after, self._context(planned.name))
            if verdict.value is None:
                failed.append(verdict)
                raise _Unmeasured
            return verdict.value

        try:
            value = self._ask(planned.name, question, measure)
            verdict = gate.verdict(float(str(value)))
        except _Unmeasured:
            verdict = failed[0]
        return verdict.model_copy(update={"against": other if gate.compares else None})

    def _measured(self, name: str) -> Measurements:
        baseline, artifact = self.artifacts[self.plan.baseline], self.artifacts[name]
        question = {"measurements": 1, "against": baseline.digest, **self._conditions()}

        def measure() -> JsonValue:
            return Measurements.of(artifact, baseline, self._context(name)).model_dump(mode="json")

        with named(name, self.out):
            return Measurements.model_validate(self._ask(name, question, measure))

    def _context(self, name: str, root: Path | None = None) -> Context:
        return Context(
            root=root or self.entries[name].artifact_path,
            data=self.data,
            metric=self.plan.metric,
            device=self.pipeline.device,
            threads=self.pipeline.threads,
            seed=self.pipeline.seed,
            earlier=dict(self.artifacts),
            progress=self.progress,
            # Not the entry's: a training goes on where another number of processes left it.
            scratch=self.store.root / WORK / name,
            results=self.out,
            scores=self.scores,
        )

    def _conditions(self) -> dict[str, Any]:
        return {
            "data": self.fingerprint,
            "metric": self.plan.metric.identity(),
            "threads": self.pipeline.threads,
            "device": self.pipeline.device,
            "seed": self.pipeline.seed,
            "machine": machine(),
        }

    def _surroundings(self, uses_data: bool) -> dict[str, Any]:
        # Training keeps the best epoch by the metric, so that decides the result as data does.
        return {
            "data": self.fingerprint if uses_data else None,
            "metric": self.plan.metric.identity() if uses_data else None,
            "seed": self.pipeline.seed,
            "versions": versions(),
        }


class _Unmeasured(Exception):
    pass
