"""Decides which stage is executed next; a failed stage stops only those that depend on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compress.artifacts.artifact import Artifact
from compress.common.requirements import undisturbed
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.runner.cache_keys import stage_key_parts

if TYPE_CHECKING:
    from compress.pipelines.executors.engines import Engine
    from compress.pipelines.planning.plan import PlannedStage
    from compress.pipelines.runner.executor import PipelineExecutor
    from compress.pipelines.runner.run_state import CacheLookup


def schedule(executor: PipelineExecutor, engine: Engine | None) -> None:
    """Import the model, and execute every stage that no failure of another one stops.

    Raises:
        CompressError: the error that decides how the run ends; the others are its notes.
    """
    state, outcome = executor.state, executor.state.outcome
    try:
        with outcome.record_failures(SOURCE):
            executor.import_model()
        if engine is None:
            for planned in state.plan.stages:
                if not outcome.should_skip(planned):
                    with outcome.record_failures(planned.name):
                        executor.run_stage(planned)
        else:
            ParallelScheduler(executor, engine, list(state.plan.stages)).run()
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
            if undisturbed(planned.stage) and self.running:
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
            return
        task = executor.task_for(planned, lookup)
        if undisturbed(planned.stage):
            self.finished[name] = executor.commit(lookup, *task(executor.state.progress))
        else:
            self.engine.submit(task)
            self.running[name] = lookup
