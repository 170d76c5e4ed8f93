"""Executes one stage: takes its artifact from the store or runs it, then evaluates its gates."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.common.dependency_recorder import Recording, recording
from compress.core.evaluation import refusal
from pipelines.config.model_spec import SOURCE
from pipelines.executors.task import StageTask
from pipelines.planning.loss_and_metric import fitting_loss
from pipelines.results.stage_reports import TestReport
from pipelines.runner import events
from pipelines.runner.cache_keys import source_key_parts, stage_key_parts
from pipelines.runner.evaluator import (
    MeasurementCache,
    evaluate_stage,
    judged_batch_size_part,
    measure_artifact,
)
from pipelines.runner.inputs import import_source
from pipelines.runner.run_history import history_before
from pipelines.runner.run_state import CacheLookup
from pipelines.store.entry import Entry, Record
from pipelines.store.local import publish, unpublish
from pipelines.system.error_context import name_stage_in_errors

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from pipelines.planning.plan import PlannedStage
    from pipelines.runner.run_state import RunState

RERUN_REQUESTED = "asked to run again"
"""Why a stage runs that `--from` or `--force` names."""


@dataclass
class PipelineExecutor:
    """Executes the stages of one run, in whichever order :mod:`scheduler` calls for them."""

    state: RunState

    def import_model(self) -> None:
        """Import the model that the pipeline starts from, and publish it.

        What an earlier run published is removed first.
        """
        state = self.state
        unpublish(state.out / "artifacts")
        lookup = self.lookup(SOURCE, source_key_parts(state))
        if not lookup.cached:
            began = time.monotonic()
            with name_stage_in_errors(SOURCE, state.out), recording() as recorded:
                artifact = import_source(state.pipeline, lookup.entry.artifact_path)
            lookup = self.commit(lookup, artifact, time.monotonic() - began, recorded)
        source = state.artifacts[SOURCE]
        publish(source, state.out / "artifacts" / SOURCE)
        cache = MeasurementCache(lookup.entry, source)
        if state.plan.baseline == SOURCE:
            state.baseline = measure_artifact(state, SOURCE, cache)
        state.emit(
            events.stage_finished_event(
                SOURCE,
                source,
                cached=lookup.cached,
                fetched_from=lookup.entry.fetched_from,
                seconds=lookup.seconds,
                evaluation_seconds=cache.seconds,
                measurements=state.baseline,
            )
        )
        self._announce_loss()

    def run_stage(self, planned: PlannedStage) -> None:
        """Take one stage's artifact from the store, or run the stage; then evaluate its gates."""
        lookup = self.lookup(planned.name, stage_key_parts(self.state, planned))
        if not lookup.cached:
            lookup = self.commit(lookup, *self.task_for(planned, lookup)(self.state.progress))
        self.evaluate(planned, lookup)

    def lookup(self, name: str, parts: dict[str, Any]) -> CacheLookup:
        """Look a stage's artifact up in the store; where it is not there, announce that it runs."""
        state = self.state
        entry, rerun = state.store.entry(parts), name in state.plan.again
        found = None if rerun else state.store.get(entry)
        if found is not None:
            artifact, record = found
            self._register(name, artifact, entry, parts)
            return CacheLookup(name, parts, entry, "", record.seconds)
        reason = RERUN_REQUESTED if rerun else state.store.explain_miss(name, parts, state.contents)
        state.emit(events.stage_started_event(name, reason))
        entry.path.mkdir(parents=True, exist_ok=True)
        return CacheLookup(name, parts, entry, reason)

    def commit(
        self, lookup: CacheLookup, artifact: Artifact, seconds: float, recorded: Recording
    ) -> CacheLookup:
        """Add the artifact of a stage that has run to the store.

        Args:
            lookup: the lookup that did not find it.
            artifact: the artifact.
            seconds: how long the stage ran.
            recorded: what user code read meanwhile.
        """
        state = self.state
        if state.data and lookup.parts["data"]:
            recorded.add(state.data.recorded_reads())
        depends = state.store.surroundings.dependencies(recorded)
        record = Record(
            parts=lookup.parts, digest=artifact.digest, seconds=seconds, depends=depends
        )
        state.store.commit(lookup.name, lookup.entry, record)
        self._register(lookup.name, artifact, lookup.entry, lookup.parts)
        return replace(lookup, seconds=seconds)

    def task_for(self, planned: PlannedStage, lookup: CacheLookup) -> StageTask:
        """Return the task that runs a stage, whose inputs must be there."""
        history = history_before(planned, self.state) if planned.stage.records_history else None
        context = self.state.context(planned.name, lookup.entry.artifact_path)
        return StageTask(
            planned.name, planned.stage, planned.input, replace(context, history=history)
        )

    def evaluate(self, planned: PlannedStage, lookup: CacheLookup) -> None:
        """Evaluate a stage's artifact, and record its report, and its refusal if a gate refused."""
        state, name = self.state, planned.name
        report = state.reports[name] = evaluate_stage(state, planned, lookup)
        if name == state.plan.baseline:
            state.baseline = report.measurements
        state.outcome.current = ""  # from here on an interruption finds the stage finished
        state.emit(
            events.stage_finished_event(
                name,
                state.artifacts[name],
                cached=report.cached,
                fetched_from=report.fetched_from,
                seconds=report.seconds,
                evaluation_seconds=report.judged_seconds,
                measurements=report.measurements,
                verdicts=report.verdicts,
            )
        )
        refused = refusal(name, report.verdicts, state.out / "artifacts" / name)
        if refused:
            state.outcome.errors[name] = refused

    def evaluate_test_split(self) -> None:
        """Measure the metric on the test split, once, of the baseline and of what is deployed.

        A run of only some of the stages leaves the test split alone.
        """
        state, plan = self.state, self.state.plan
        if state.data is None or "test" not in state.data.datasets or plan.cut:
            return
        values: dict[str, float] = {}
        for name in dict.fromkeys((plan.baseline, *plan.leaves)):
            key = {"metric on": "test", **state.measurement_conditions()}
            key |= judged_batch_size_part(state, name)
            artifact = state.artifacts[name]
            score = functools.partial(state.context(name).score, artifact, "test")
            with name_stage_in_errors(name, state.out):
                value = state.entries[name].cached_value(key, artifact, score)
            values[name] = float(str(value))
        state.test = TestReport(metric=plan.metric.name, values=values)

    def _announce_loss(self) -> None:
        """Announce which loss and metric follow from the targets.

        Raises:
            PipelineInvalid: outputs and targets do not fit the loss.
        """
        state = self.state
        key: dict[str, Any] = {
            "loss": state.plan.loss.identity(),
            "metric": state.plan.metric.name,
            "data": state.fingerprint,
            "stages": [planned.stage.own_settings() for planned in state.plan.stages],
        }
        context, source = state.context(SOURCE), state.artifacts[SOURCE]
        fitting = functools.partial(fitting_loss, state.plan, state.pipeline, source, context)
        line = str(state.entries[SOURCE].cached_value(key, source, fitting))
        if line:
            state.emit(events.loss_inferred_event(line))

    def _register(self, name: str, artifact: Artifact, entry: Entry, parts: dict[str, Any]) -> None:
        self.state.artifacts[name], self.state.entries[name] = artifact, entry
        self.state.store.save_last_parts(name, parts)
