"""Walking the road: each stage is reused or made, judged, and reported."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.common.dependency_recorder import Dependencies, Recording, recording
from compress.core.context import Context
from compress.data.sample_cache import PROBES
from pipelines.config.declared_dependencies import declared
from pipelines.executors.task import StageTask
from pipelines.planning.loss_and_metric import fitting_loss
from pipelines.planning.plan import SOURCE, Plan, PlannedStage
from pipelines.results.schema import Report, TestReport, how_to_run, warnings_of
from pipelines.runner import events
from pipelines.runner.data_warnings import doubts_of_val
from pipelines.runner.evaluator import evaluate_stage, judged_batch_size, measured, refusal_of
from pipelines.runner.inputs import import_source, source_parts
from pipelines.runner.run_history import history_before, history_parts
from pipelines.runner.run_state import RunOutcome
from pipelines.runner.run_warnings import suspicions
from pipelines.store.entry import Entry, Record
from pipelines.store.local import WORK, Store, publish, unpublish
from pipelines.system.error_context import named
from pipelines.system.machine_info import machine, version_of, versions
from pipelines.system.signals import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.core.progress import Progress
    from compress.data.splits import Splits
    from compress.profiling.batch_dependence import BatchDependence
    from pipelines.config.pipeline import Pipeline
    from pipelines.results.measurements import Measurements
    from pipelines.results.schema import StageReport, Status
    from pipelines.runner.events import EventListener

ASKED = "asked to run again"


@dataclass(frozen=True)
class CacheLookup:
    """A stage's place in the store, and why its artifact must be made where it is not there."""

    name: str
    parts: dict[str, Any]
    """Everything that decides the artifact."""
    entry: Entry
    reason: str
    """Empty where the store holds it."""
    seconds: float = 0.0
    """How long it took to be made."""


@dataclass
class PipelineExecutor:
    """One run: what has been made so far."""

    pipeline: Pipeline
    plan: Plan
    out: Path
    store: Store
    data: Splits | None
    progress: Progress
    emit: EventListener
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    rows: list[StageReport] = field(default_factory=list)
    scores: dict[tuple[Any, ...], tuple[float, Recording]] = field(default_factory=dict)
    dependences: dict[str, BatchDependence] = field(default_factory=dict)
    baseline: Measurements | None = None
    tested: TestReport | None = None

    def __post_init__(self) -> None:
        self.contents = self.data.contents() if self.data else None
        self.fingerprint = self.contents.fingerprint if self.contents else None
        depends = declared(self.pipeline)
        self.declared = {} if depends == Dependencies() else {"depends": depends.model_dump()}
        self.doubts_of_val = tuple(doubts_of_val(self.contents)) if self.contents else ()
        self.outcome = RunOutcome(self.plan, self.emit)

    def import_model(self) -> None:
        """Bring in the model as it is; what an earlier run published makes room."""
        unpublish(self.out / "artifacts")
        sought = self.lookup(SOURCE, self.source_parts())
        if sought.reason:
            began = time.monotonic()
            with named(SOURCE, self.out), recording() as recorded:
                artifact = import_source(self.pipeline, sought.entry.artifact_path)
            sought = self.commit(sought, artifact, time.monotonic() - began, recorded)
        publish(self.artifacts[SOURCE], self.out / "artifacts" / SOURCE)
        seconds = 0.0
        if self.plan.baseline == SOURCE:
            self.baseline, seconds = measured(self, SOURCE)
        self.emit(
            events.stage_finished_event(sought, self.artifacts[SOURCE], seconds, self.baseline)
        )
        self._announce_loss()

    def run_stage(self, planned: PlannedStage) -> None:
        """Reuse or make one stage, then measure and judge it.

        Raises:
            GateRefused: a gate refused.
        """
        sought = self.lookup(planned.name, self.cache_key_parts(planned))
        if sought.reason:
            sought = self.commit(sought, *self.task_for(planned, sought)(self.progress))
        self.evaluate(planned, sought)

    def lookup(self, name: str, parts: dict[str, Any]) -> CacheLookup:
        """Take an artifact from the store, or tell why it must be made."""
        entry, again = self.store.entry(parts), name in self.plan.again
        found = None if again else self.store.get(entry)
        if found is not None:
            artifact, record = found
            self._register(name, artifact, entry, parts)
            return CacheLookup(name, parts, entry, "", record.seconds)
        reason = ASKED if again else self.store.explain_miss(name, parts, self.contents)
        self.emit(events.stage_started_event(name, reason))
        entry.path.mkdir(parents=True, exist_ok=True)
        return CacheLookup(name, parts, entry, reason)

    def commit(
        self, sought: CacheLookup, artifact: Artifact, seconds: float, recorded: Recording
    ) -> CacheLookup:
        """Make what was made part of the store, with what user code read meanwhile."""
        if self.data and sought.parts["data"]:
            recorded.add(self.data.recorded_reads())
        depends = self.store.surroundings.dependencies(recorded)
        record = Record(
            parts=sought.parts, digest=artifact.digest, seconds=seconds, depends=depends
        )
        self.store.commit(sought.name, sought.entry, record)
        self._register(sought.name, artifact, sought.entry, sought.parts)
        return replace(sought, seconds=seconds)

    def task_for(self, planned: PlannedStage, sought: CacheLookup) -> StageTask:
        """Return the making of a stage's artifact, whose inputs are there."""
        history = history_before(planned, self) if planned.stage.records_history else None
        context = self.context(planned.name, sought.entry.artifact_path)
        return StageTask(
            planned.name, planned.stage, planned.input, replace(context, history=history)
        )

    def evaluate(self, planned: PlannedStage, sought: CacheLookup) -> None:
        """Prove, publish, measure and judge what a stage has made.

        Raises:
            GateRefused: a gate refused.
        """
        row = evaluate_stage(self, planned, sought)
        if planned.name == self.plan.baseline:
            self.baseline = row.measurements
        self.rows.append(row)
        self.outcome.at = ""  # whoever interrupts it from here on finds it done
        artifact = self.artifacts[planned.name]
        self.emit(
            events.stage_finished_event(
                sought, artifact, row.judged_seconds, row.measurements, row.verdicts
            )
        )
        refusal = refusal_of(row, self.out)
        if refusal:
            raise refusal

    @functools.cached_property
    def imported_model_parts(self) -> dict[str, Any]:
        """What decides the model that came in; its files are hashed once a run."""
        return source_parts(self.pipeline)

    def source_parts(self) -> dict[str, Any]:
        """Return everything that decides the imported model."""
        return {**self.imported_model_parts, **self._environment_parts(uses_data=False)}

    def cache_key_parts(self, planned: PlannedStage) -> dict[str, Any]:
        """Return everything that decides a stage's artifact."""
        return {
            "stage": planned.stage.stage,
            "settings": planned.stage.own_settings(),
            # Not by its name: whatever it is called, the same weights give the same artifact.
            "input": self.artifacts[planned.input].digest,
            "others": {n: self.artifacts[n].digest for n in planned.stage.extra_inputs},
            "library": version_of(type(planned.stage).__module__),
            **self._calibration(planned),
            **planned.stage.machine_parts,
            **({"loss": self.plan.loss.identity()} if planned.stage.uses_loss else {}),
            **history_parts(planned, self),
            **self._environment_parts(planned.stage.uses_data),
        }

    def test(self) -> None:
        """Touch the test split, once, for what came in and what ships; not where a run is cut."""
        if self.data is None or "test" not in self.data.datasets or self.plan.cut:
            return
        values: dict[str, float] = {}
        for name in dict.fromkeys((self.plan.baseline, *self.plan.leaves)):
            question = {"metric on": "test", **self.conditions(), **judged_batch_size(self, name)}
            score = functools.partial(self.context(name).score, self.artifacts[name], "test")
            with named(name, self.out):
                answer = self.entries[name].cached_value(question, self.artifacts[name], score)
                values[name] = float(str(answer))
        self.tested = TestReport(metric=self.plan.metric.name, values=values)

    def report(self, status: Status, error: str = "") -> Report:
        """Return what happened so far."""
        outcome, in_order = self.outcome, self.plan.ordered
        rows = {row.name: row for row in self.rows}
        stages = tuple(rows[name] for name in in_order(rows))
        failures = tuple(outcome.failures[name] for name in in_order(outcome.failures))
        report = Report(
            pipeline=self.pipeline.name,
            status=status,
            error=error,
            failed_stage=failures[0] if failures else None,
            failures=failures,
            skipped=tuple(outcome.skipped[name] for name in in_order(outcome.skipped)),
            baseline_name=self.plan.baseline,
            baseline=self.baseline,
            stages=stages,
            warnings=(
                *self.doubts_of_val,
                *(suspicions(self) if status != INTERRUPTED else ()),
                *warnings_of(stages, self.plan.baseline, self.baseline),
            ),
            test=self.tested,
            lock={
                "source": self.store.last_parts(SOURCE),
                "file": self.pipeline.file,
                "command": how_to_run(self.pipeline.file, self.out),
                "versions": dict(versions()),
                "machine": dict(machine()),
                "seed": self.pipeline.seed,
                "data": self.fingerprint,
                "artifacts": {n: self.artifacts[n].digest for n in in_order(self.artifacts)},
                "settings": self.pipeline.model_dump(mode="json", by_alias=True),
            },
        )
        warnings = (*report.warnings, *self._sampled(), *self.store.warnings)
        return report.model_copy(update={"warnings": warnings})

    def _sampled(self) -> Iterator[str]:
        """Yield which splits were not hashed whole, where a stage was taken from the store."""
        for name in sorted({"val", "test"} & self.contents.cached if self.contents else ()):
            yield (
                f"data.{name}: read through data.loader.cache; only {PROBES} samples are compared "
                "with the dataset"
            )
        users = {p.name for p in self.plan.stages if p.stage.uses_data}
        cached = [row.name for row in self.rows if row.cached and row.name in users]
        if not self.contents or not cached:
            return
        for name in self.contents.sampled:
            counts = f"{self.contents.counts[name]} of {self.contents.lengths[name]} samples"
            yield (
                f"data.{name}: sampled ({counts} hashed); a change of the others would not be seen "
                f"in what is cached ({', '.join(cached)})"
            )

    def context(self, name: str, root: Path | None = None) -> Context:
        """Return where a stage runs or is judged, with the artifacts that it names or rests on."""
        needed = {SOURCE, *self.plan.branch(name), *self.plan.needs(name)}
        return Context(
            root=root or self.entries[name].artifact_path,
            data=self.data,
            loss=self.plan.loss,
            metric=self.plan.metric,
            device=self.pipeline.device,
            threads=self.pipeline.threads,
            seed=self.pipeline.seed,
            artifacts={n: artifact for n, artifact in self.artifacts.items() if n in needed},
            progress=self.progress,
            # Not the entry's: a training goes on where another number of processes left it.
            scratch=self.store.root / WORK / name,
            results=self.out,
            scores=self.scores,
            served_batch_size=self.pipeline.served_batch_size,
            dependences=self.dependences,
        )

    def conditions(self) -> dict[str, Any]:
        """Return what a measurement depends on, besides what is measured."""
        return {
            "data": self.fingerprint,
            "metric": self.plan.metric.identity(),
            "threads": self.pipeline.threads,
            "device": self.pipeline.device,
            "seed": self.pipeline.seed,
            "machine": machine(),
            **self.declared,
        }

    def _announce_loss(self) -> None:
        """Say which loss the targets ask for.

        Raises:
            PipelineInvalid: outputs and targets do not fit the loss.
        """
        question: dict[str, Any] = {
            "loss": self.plan.loss.identity(),
            "metric": self.plan.metric.name,
            "data": self.fingerprint,
            "stages": [planned.stage.own_settings() for planned in self.plan.stages],
        }
        context, source = self.context(SOURCE), self.artifacts[SOURCE]
        fitting = functools.partial(fitting_loss, self.plan, self.pipeline, source, context)
        line = str(self.entries[SOURCE].cached_value(question, source, fitting))
        if line:
            self.emit(events.task_known(line))

    def _register(self, name: str, artifact: Artifact, entry: Entry, parts: dict[str, Any]) -> None:
        self.artifacts[name], self.entries[name] = artifact, entry
        self.store.save_last_parts(name, parts)

    def _calibration(self, planned: PlannedStage) -> dict[str, Any]:
        """Return a digest of the samples that a stage draws, where the data's own has not all."""
        count = planned.stage.drawn_samples if planned.stage.uses_data else 0
        if not count or self.data is None:
            return {}
        digest = self.data.calibration_digest(count, self.pipeline.seed)
        return {"calibration": digest} if digest else {}

    def _environment_parts(self, uses_data: bool) -> dict[str, Any]:
        # Training keeps the best epoch by the metric, so that decides the result as data does.
        return {
            "data": self.contents.parts if uses_data and self.contents else None,
            "metric": self.plan.metric.identity() if uses_data else None,
            "seed": self.pipeline.seed,
            "versions": versions(),
            **self.declared,
        }
