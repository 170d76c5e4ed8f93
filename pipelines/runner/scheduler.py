"""The order in which stages are walked: what one stage's failure does not concern goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from compress.artifacts.artifact import Artifact
from compress.common.requirements import undisturbed
from pipelines.planning.plan import SOURCE

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.executors.task import StageTask, TaskResult
    from pipelines.planning.plan import PlannedStage
    from pipelines.runner.executor import CacheLookup, PipelineExecutor


class Engine(Protocol):
    """Makes several stages at a time, elsewhere."""

    @property
    def places(self) -> int:
        """How many it makes at a time."""
        ...

    def submit(self, making: StageTask) -> None:
        """Have a stage made, where there is a place."""
        ...

    def next(self) -> TaskResult:
        """Wait until a stage that was begun has been made, or has failed."""
        ...

    def close(self) -> None:
        """End what is still under way."""
        ...


def schedule(walk: PipelineExecutor, engine: Engine | None) -> None:
    """Bring in the model, and walk every stage that no other one's failure keeps from running.

    Args:
        walk: the run.
        engine: makes branches side by side; without it stage follows stage in this process.

    Raises:
        CompressError: the error that decides how the run ends; the others are its notes.
    """
    try:
        with walk.outcome.record_failures(SOURCE):
            walk.import_model()
        if engine is None:
            _in_turn(walk)
        else:
            ParallelScheduler(walk, engine, list(walk.plan.stages)).run()
    finally:
        if engine is not None:
            engine.close()
    error = walk.outcome.error()
    if error:
        raise error


def _in_turn(walk: PipelineExecutor) -> None:
    for planned in walk.plan.stages:
        if not walk.outcome.should_skip(planned):
            with walk.outcome.record_failures(planned.name):
                walk.run_stage(planned)


@dataclass
class ParallelScheduler:
    """Branches that are made at the same time, and judged one after another.

    Nothing is measured while something is made, so that times are true: what has been made waits
    until nothing is under way and nothing more can be begun.
    """

    walk: PipelineExecutor
    engine: Engine
    waiting: list[PlannedStage]
    under_way: dict[str, CacheLookup] = field(default_factory=dict)
    made: dict[str, CacheLookup] = field(default_factory=dict)

    def run(self) -> None:
        """Walk all stages."""
        try:
            while self.waiting or self.under_way or self.made:
                self._start_ready_stages()
                if self.under_way:
                    self._collect(self.engine.next())
                else:
                    self._judge()
        except BaseException:
            self.walk.outcome.elsewhere = tuple(self.under_way)
            raise

    def _start_ready_stages(self) -> None:
        for planned in tuple(self.waiting):
            if not self._inputs_are_ready(planned):
                continue
            if self.walk.outcome.should_skip(planned):
                self.waiting.remove(planned)
            elif self._has_place(planned):
                self.waiting.remove(planned)
                with self.walk.outcome.record_failures(planned.name):
                    self._begin(planned)

    def _inputs_are_ready(self, planned: PlannedStage) -> bool:
        """Whether what a stage needs was judged, has failed or was skipped."""
        walk, outcome = self.walk, self.walk.outcome
        known = {SOURCE, *outcome.errors, *outcome.skipped, *(row.name for row in walk.rows)}
        return {*planned.needs, walk.plan.baseline} - {planned.name} <= known

    def _has_place(self, planned: PlannedStage) -> bool:
        if len(self.under_way) >= self.engine.places:
            return False
        if undisturbed(planned.stage) and self.under_way:
            return False
        # What is being made for another branch will be in the store.
        return self._place(planned) not in {s.entry.path for s in self.under_way.values()}

    def _place(self, planned: PlannedStage) -> Path:
        return self.walk.store.entry(self.walk.cache_key_parts(planned)).path

    def _begin(self, planned: PlannedStage) -> None:
        walk, name = self.walk, planned.name
        sought = walk.lookup(name, walk.cache_key_parts(planned))
        if not sought.reason:
            self.made[name] = sought
        elif undisturbed(planned.stage):
            self.made[name] = walk.commit(sought, *walk.task_for(planned, sought)(walk.progress))
        else:
            self.engine.submit(walk.task_for(planned, sought))
            self.under_way[name] = sought

    def _collect(self, made: TaskResult) -> None:
        with self.walk.outcome.record_failures(made.name):
            sought = self.under_way.pop(made.name)
            if made.error:
                raise made.error
            artifact = Artifact.from_directory(sought.entry.artifact_path)
            self.made[made.name] = self.walk.commit(sought, artifact, made.seconds, made.recorded)

    def _judge(self) -> None:
        """Judge all that has been made, in the plan's order."""
        for planned in self.walk.plan.stages:
            if planned.name in self.made:
                with self.walk.outcome.record_failures(planned.name):
                    self.walk.evaluate(planned, self.made.pop(planned.name))
