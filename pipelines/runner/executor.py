"""Executes stages in order or in parallel: lookup in the store, run, commit, gates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import Artifact
from compress.common.dependency_recorder import Recording, recording
from compress.common.errors import CompressError, first_line
from compress.common.malloc import trim_memory
from compress.common.requirements import undisturbed
from compress.core.context import ExportCache
from compress.core.diagnosis.cause import is_explained
from compress.core.gates.runtime import BASELINES, BaselineArtifact
from compress.core.stage import refusal
from compress.export.exporter import Exporter
from compress.export.onnx.stage import ExportOnnx
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.executors.task import StageTask
from compress.pipelines.planning.loss_and_metric import fitting_loss, metric_takes_first
from compress.pipelines.results.measurements import NOT_MEASURED, Measurements
from compress.pipelines.results.schema import FIDELITY, TestReport
from compress.pipelines.runner import evaluator
from compress.pipelines.runner.cache_keys import (
    history_before,
    served_latency,
    source_key_parts,
    stage_key_parts,
)
from compress.pipelines.runner.run_state import CacheLookup, RunState
from compress.pipelines.runner.source_model import import_source
from compress.pipelines.store.entry import Entry, Record
from compress.pipelines.store.local import publish, unpublish
from compress.pipelines.system import signals
from compress.pipelines.system.error_context import name_stage_in_errors

if TYPE_CHECKING:
    from compress.core.verdict import Verdict
    from compress.pipelines.executors.engines import Engine
    from compress.pipelines.planning.plan import PlannedStage

NOT_TIMED = f"{NOT_MEASURED}the run ended before it was timed"
RERUN_REQUESTED = "asked to run again"  # why a stage runs that `--from` or `--force` names
# Of a ResNet-18 PyTorch takes 30 ms a row and ONNX Runtime 16. Fewer than these PyTorch computes in
# less than a second, and then the model itself can as well answer.
DEAR_MACS = 10**10
"""Multiply-accumulates of `val` from which on the uncompressed model's file answers for it."""


@dataclass
class PipelineExecutor:
    """Executes the stages of one run, in whichever order :func:`schedule` calls for them."""

    state: RunState
    ahead: dict[str, CacheLookup | CompressError] = field(default_factory=dict)
    """Exports that ran before the stage that they read was evaluated, or why they failed."""
    times_baseline_last: bool = False
    """Whether the imported model is timed in turn with exports of the run, which comes later."""

    def import_model(self) -> None:
        """Import the model that the pipeline starts from, and publish it."""
        state = self.state
        unpublish(state.out / "artifacts")  # what an earlier run published
        lookup = self.lookup(SOURCE, source_key_parts(state))
        if not lookup.cached:
            began = time.monotonic()
            with (
                name_stage_in_errors(SOURCE, state.out),
                state.profiler.section(SOURCE, "run"),
                recording() as recorded,
            ):
                artifact = import_source(state.pipeline, lookup.entry.artifact_path, state.data)
            lookup = self.commit(lookup, artifact, time.monotonic() - began, recorded)
        source = state.artifacts[SOURCE]
        publish(source, state.out / "artifacts" / SOURCE)
        cache = evaluator.ArtifactEvaluator(state, SOURCE)
        context, plan, pipeline = state.context(SOURCE), state.plan, state.pipeline
        loss_key: dict[str, Any] = {
            "loss": plan.loss.identity(),
            "metric": plan.metric.identity(),
            "data": state.fingerprint,
            "stages": [planned.stage.own_settings() for planned in plan.stages],
        }

        def fit() -> str:  # by the file that answers for the model, once there is one
            context = state.context(SOURCE)
            tried = partial(fitting_loss, plan, pipeline, source, context, state.contents)
            return cache.get_or_measure(loss_key, tried)

        def fit_early() -> None:  # the price of two calls; all of `fit` would take the model itself
            key, takes = {"first samples": 1, **loss_key}, metric_takes_first
            if not cache.get_or_measure(key, partial(takes, plan, source, state.context(SOURCE))):
                fit()

        if plan.baseline == SOURCE:
            if SOURCE in state.unmeasured:
                state.baseline = Measurements.sizes(source, source, context, state.why_unmeasured)
            else:
                with state.profiler.section(SOURCE, "evaluation"):
                    self._answer_by_file(cache, fit_early)
                    exports = any(isinstance(p.stage, Exporter) for p in plan.stages)
                    self.times_baseline_last = exports and not state.is_quick
                    untimed = NOT_TIMED if self.times_baseline_last else ""
                    state.baseline = cache.measure(fit, untimed)
        self._emit_finished(lookup, cache.seconds, state.baseline)
        if line := fit():
            state.emit("task_known", None, line)
        trim_memory()

    def _answer_by_file(
        self, cache: evaluator.MeasurementCache, fit_early: Callable[[], None]
    ) -> None:
        """Write the uncompressed model as an ONNX file now, which then answers for it.

        Only where the speed of a later stage's file is compared with it anyway, and the model is so
        large that its calls are what judging costs. Where it cannot be written, the model answers.
        `fit_early` is called before it is written, and raises where the data do not fit the model.
        """
        state, source, context = self.state, cache.artifact, self.state.context(SOURCE)
        stages = [p for p in state.plan.stages if isinstance(p.stage, ExportOnnx)]
        # What must answer as the model does is compared with the model's own answers.
        exported = {p.input for p in state.plan.stages if p.stage.keeps_outputs}
        if (
            {p.name for p in stages} <= state.unmeasured
            or SOURCE in exported
            or state.is_quick
            or not (state.data is not None and "val" in state.data.datasets)
            or not (source.kind == "eager" and state.pipeline.device == "cpu")
            or not state.plan.metric.is_measured
            or source.is_streamed
        ):
            return
        try:
            key = {"multiply-accumulates": 1, "data": state.fingerprint}
            sizes = partial(context.typical_sizes, source.signature)
            macs = cache.get_or_measure(key, lambda: context.macs(source, sizes()) or 0)
        except Exception as error:  # noqa: BLE001 - the user's own code may raise any
            self._without_file(error)
            return
        if macs * len(state.data.split("val")) < DEAR_MACS:  # type: ignore[arg-type]
            return
        fit_early()
        try:
            began = time.monotonic()
            runtime = BASELINES[ExportOnnx.runtime.name]
            file = BaselineArtifact(runtime, source, source, context).written()
            cache.seconds += time.monotonic() - began
        except Exception as error:  # noqa: BLE001 - the user's own code may raise any
            self._without_file(error)
        else:
            state.baseline_file = file

    def _without_file(self, error: Exception) -> None:
        # Whatever the user's own code raises here, it raises again where the model is called.
        if signals.exit_code():  # the error is a consequence of it
            raise error
        why = f"{type(error).__name__}: {first_line(error)}"
        self.state.emit("message", None, f"{SOURCE}: no ONNX file answers for the model ({why})")

    def lookup(self, name: str, parts: dict[str, Any]) -> CacheLookup:
        """Look a stage's artifact up in the store; where it is not there, announce that it runs."""
        state = self.state
        entry, rerun = state.store.entry(parts), name in state.plan.again
        found = None if rerun else state.store.get(entry)
        if found is not None:
            artifact, record = found
            self._register(name, artifact, entry, parts)
            return CacheLookup(name, parts, entry, "", record.seconds)
        state.load_data()
        reason = RERUN_REQUESTED if rerun else state.store.explain_miss(name, parts, state.contents)
        line = f"{name}: running ({reason})"
        state.emit("stage_started", name, line, {"reason": reason})
        return CacheLookup(name, parts, entry, reason)

    def commit(
        self, lookup: CacheLookup, artifact: Artifact, seconds: float, recorded: Recording
    ) -> CacheLookup:
        """Add the artifact of a stage that has run to the store, with what user code read."""
        state = self.state
        # The data were loaded before the stage began: what their code read decides it as well.
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
        served = served_latency(planned, self.state)
        # The store's exports stay here: another process may run the stage, and compares no speed.
        context = replace(context, history=history, served_latency=served, exports=ExportCache())
        return StageTask(planned.name, planned.stage, planned.input, context)

    def time_baseline(self) -> None:
        """Measure how long the imported model takes, unless that was measured beside an export."""
        state = self.state
        if self.times_baseline_last and state.baseline is not None:
            with state.profiler.section(SOURCE, "evaluation"):
                state.baseline = evaluator.ArtifactEvaluator(state, SOURCE).measure()

    def find_or_run(self, planned: PlannedStage) -> CacheLookup:
        """Take a stage's artifact from the store, else run the stage in this process."""
        known = self.ahead.pop(planned.name, None)
        if isinstance(known, CompressError):
            raise known
        lookup = known or self.lookup(planned.name, stage_key_parts(self.state, planned))
        if not (known or lookup.cached):
            task = self.task_for(planned, lookup)
            with self.state.profiler.section(planned.name, "run"):
                lookup = self.commit(lookup, *task(self.state.progress))
        return lookup

    def export_ahead(self, planned: PlannedStage) -> None:
        """Export an integer graph to ONNX before its turn: the file answers for the graph.

        Only where the plan has that export anyway, which compares the two; its turn reports errors.
        """
        state, facts = self.state, self.state.artifacts[planned.name].manifest.facts
        ready = {planned.name, SOURCE, *state.reports}
        exports = [
            each
            for each in state.plan.stages
            if isinstance(each.stage, ExportOnnx)
            and each.input == planned.name
            and {*each.reads} <= ready
        ]
        # Stages that quantize or convert record the fidelity, those that convert the type as well.
        is_integer = FIDELITY in facts and "dtype" not in facts
        has_val = state.data is not None and "val" in state.data.datasets
        if not (exports and is_integer and has_val and state.pipeline.device == "cpu"):
            return
        export = exports[0]
        state.outcome.current = export.name
        try:
            lookup = self.ahead[export.name] = self.find_or_run(export)
            exported = evaluator.ArtifactEvaluator(state, export.name)
            with state.profiler.section(export.name, "evaluation"):
                # Before it answers: a cached file was compared on what may be other data.
                exported.check_parity(export, lookup)
                exported.batch_dependence()
        except CompressError as error:
            if signals.exit_code():  # the error is a consequence of it
                raise
            self.ahead[export.name] = error
        else:
            state.exported_as[planned.name] = export.name
        state.outcome.current = planned.name

    def evaluate(self, planned: PlannedStage, lookup: CacheLookup) -> None:
        """Evaluate a stage's artifact, and record its report, and its refusal if a gate refused."""
        state, name = self.state, planned.name
        with state.profiler.section(name, "evaluation"):
            judged = evaluator.ArtifactEvaluator(state, name)
            report = state.reports[name] = judged.evaluate(planned, lookup)
        if name == state.plan.baseline:
            state.baseline = report.measurements
        state.outcome.current = ""  # from here on an interruption finds the stage finished
        self._emit_finished(lookup, report.judged_seconds, report.measurements, report.verdicts)
        trim_memory()
        explained = any(is_explained(verdict) for verdict in report.verdicts if not verdict.passed)
        run = state.out if explained else None
        refused = refusal(name, report.verdicts, state.out / "artifacts" / name, run)
        if refused:
            state.outcome.errors[name] = refused

    def evaluate_test_split(self) -> None:
        """Measure the metric on the test split, once, of the baseline and of what is deployed."""
        state, plan = self.state, self.state.plan
        # A run of only some of the stages leaves the test split alone.
        has_test = state.data is not None and "test" in state.data.datasets
        if not has_test or plan.cut or not plan.metric.is_measured:
            return
        has_val = "val" in state.data.datasets  # type: ignore[union-attr]
        called = (n for n in (plan.baseline, *plan.leaves) if not state.artifacts[n].not_run)
        names = dict.fromkeys(called)
        judged = {name: evaluator.ArtifactEvaluator(state, name) for name in names}
        scores = {name: each.score("test") for name, each in judged.items()}
        unlike_val = {}
        for name in names if has_val else ():
            if name in state.unmeasured:
                continue
            by_split = {"val": judged[name].score("val"), "test": scores[name]}
            chance = {split: score.uncertainty() for split, score in by_split.items()}
            ends = [each.interval for each in chance.values() if each.interval]
            if len(ends) == 2 and max(low for low, _ in ends) > min(high for _, high in ends):
                shown = " and ".join(
                    f"{score.value:.4f} on {split} ({chance[split].in_words()})"
                    for split, score in by_split.items()
                )
                line = (
                    f"{name}: {plan.metric.name} is {shown}, beyond what chance explains: test and "
                    "val are not samples of the same data, or val was trained on"
                )
                unlike_val[line] = (name,)
        state.test = TestReport(
            metric=plan.metric.name,
            values={name: score.value for name, score in scores.items()},
            samples=scores[plan.baseline].samples,
            unlike_val=unlike_val,
        )

    def _emit_finished(
        self,
        lookup: CacheLookup,
        evaluation_seconds: float,
        measurements: Measurements | None,
        verdicts: Sequence[Verdict] = (),
    ) -> None:
        """Emit that a stage has run, or was taken from the store, and was evaluated."""
        name, artifact = lookup.name, self.state.artifacts[lookup.name]
        origin = f" (from {lookup.entry.fetched_from})" if lookup.entry.fetched_from else ""
        words = [f"cached{origin}" if lookup.cached else f"ran in {lookup.seconds:.1f} s"]
        if evaluation_seconds:
            words.append(f"evaluated in {evaluation_seconds:.1f} s")
        if measurements and measurements.metric:
            words.append(f"{measurements.metric.name} {measurements.metric.value:.4f}")
        if verdicts:
            words.append(f"{sum(v.passed for v in verdicts)}/{len(verdicts)} gates passed")
        fields = {
            "seconds": lookup.seconds,
            "judged_seconds": evaluation_seconds,
            "kind": artifact.kind,
            "digest": artifact.digest,
            # Of an imported model that is not the baseline nothing is measured.
            "measurements": measurements.model_dump(mode="json") if measurements else None,
        }
        event = "stage_cached" if lookup.cached else "stage_finished"
        self.state.emit(event, name, f"{name}: {', '.join(words)}", fields)

    def _register(self, name: str, artifact: Artifact, entry: Entry, parts: dict[str, Any]) -> None:
        self.state.artifacts[name], self.state.entries[name] = artifact, entry
        self.state.store.save_last_parts(name, parts)


def schedule(executor: PipelineExecutor, engine: Engine | None) -> None:
    """Import the model, and execute every stage that no failure of another one stops."""
    state, outcome = executor.state, executor.state.outcome
    try:
        with outcome.record_failures(SOURCE):
            executor.import_model()
        if engine is None:
            for planned in state.plan.stages:
                if outcome.should_skip(planned):
                    state.artifacts.pop(planned.name, None)  # that of an export ahead of its turn
                else:
                    with outcome.record_failures(planned.name):
                        lookup = executor.find_or_run(planned)
                        executor.export_ahead(planned)
                        executor.evaluate(planned, lookup)
        else:
            ParallelScheduler(executor, engine, list(state.plan.stages)).run()
        with outcome.record_failures(SOURCE):
            executor.time_baseline()
    finally:
        if engine is not None:
            engine.close()
    error = outcome.error()
    if error:
        raise error


@dataclass
class ParallelScheduler:
    """Runs the stages of several branches at a time, and evaluates their results one at a time."""

    executor: PipelineExecutor
    engine: Engine
    waiting: list[PlannedStage]
    running: dict[str, CacheLookup] = field(default_factory=dict)
    finished: dict[str, CacheLookup] = field(default_factory=dict)
    """Stages whose artifact is in the store and not evaluated yet."""

    def run(self) -> None:
        """Execute all stages."""
        executor, outcome = self.executor, self.executor.state.outcome
        try:
            while self.waiting or self.running or self.finished:
                self._start_ready_stages()
                # Measuring while a stage runs would distort latencies: finished stages wait until
                # none is running and none can be started.
                if self.running:
                    result = self.engine.next()
                    with outcome.record_failures(result.name):
                        lookup = self.running.pop(result.name)
                        if result.error:
                            raise result.error
                        artifact = Artifact.from_directory(lookup.entry.artifact_path)
                        self.finished[result.name] = executor.commit(
                            lookup, artifact, result.seconds, result.recorded
                        )
                    continue
                for planned in executor.state.plan.stages:
                    if planned.name in self.finished:
                        with outcome.record_failures(planned.name):
                            executor.evaluate(planned, self.finished.pop(planned.name))
        except BaseException:
            outcome.running_elsewhere = tuple(self.running)
            raise

    def _start_ready_stages(self) -> None:
        state, outcome = self.executor.state, self.executor.state.outcome
        for planned in tuple(self.waiting):
            settled = {SOURCE, *outcome.errors, *outcome.skipped, *state.reports}
            if not {*planned.needs, state.plan.baseline} - {planned.name} <= settled:
                continue
            if outcome.should_skip(planned):
                self.waiting.remove(planned)
                continue
            if len(self.running) >= self.engine.places:
                continue
            if undisturbed(planned.stage, self.engine.runs_apart) and self.running:
                continue
            # Another branch may be running the same stage: then its artifact will be in the store.
            path = state.store.entry(stage_key_parts(state, planned)).path
            if path not in {lookup.entry.path for lookup in self.running.values()}:
                self.waiting.remove(planned)
                with outcome.record_failures(planned.name):
                    self._start(planned)

    def _start(self, planned: PlannedStage) -> None:
        executor, name = self.executor, planned.name
        lookup = executor.lookup(name, stage_key_parts(executor.state, planned))
        if lookup.cached:
            self.finished[name] = lookup
        elif undisturbed(planned.stage, self.engine.runs_apart):
            task = executor.task_for(planned, lookup)
            self.finished[name] = executor.commit(lookup, *task(executor.state.progress))
        else:
            self.engine.submit(executor.task_for(planned, lookup))
            self.running[name] = lookup
