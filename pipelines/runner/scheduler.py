"""The order in which stages are walked: what one stage's failure does not concern goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from compress.artifacts.artifact import Artifact
from compress.common.requirements import undisturbed
from pipelines.planning.plan import SOURCE

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.executors.task import Made, Making
    from pipelines.planning.plan import PlannedStage
    from pipelines.runner.executor import Sought, Walk


class Engine(Protocol):
    """Makes several stages at a time, elsewhere."""

    @property
    def places(self) -> int:
        """How many it makes at a time."""
        ...

    def begin(self, making: Making) -> None:
        """Have a stage made, where there is a place."""
        ...

    def next(self) -> Made:
        """Wait until a stage that was begun has been made, or has failed."""
        ...

    def close(self) -> None:
        """End what is still under way."""
        ...


def walk_branches(walk: Walk, engine: Engine | None) -> None:
    """Bring in the model, and walk every stage that no other one's failure keeps from running.

    Args:
        walk: the run.
        engine: makes branches side by side; without it stage follows stage in this process.

    Raises:
        CompressError: the error that decides how the run ends; the others are its notes.
    """
    try:
        with walk.outcome.noting(SOURCE):
            walk.import_model()
        if engine is None:
            _in_turn(walk)
        else:
            _SideBySide(walk, engine, list(walk.plan.stages)).go()
    finally:
        if engine is not None:
            engine.close()
    error = walk.outcome.error()
    if error:
        raise error


def _in_turn(walk: Walk) -> None:
    for planned in walk.plan.stages:
        if not walk.outcome.skips(planned):
            with walk.outcome.noting(planned.name):
                walk.step(planned)


@dataclass
class _SideBySide:
    """Branches that are made at the same time, and judged one after another.

    Nothing is measured while something is made, so that times are true: what has been made waits
    until nothing is under way and nothing more can be begun.
    """

    walk: Walk
    engine: Engine
    waiting: list[PlannedStage]
    under_way: dict[str, Sought] = field(default_factory=dict)
    made: dict[str, Sought] = field(default_factory=dict)

    def go(self) -> None:
        """Walk all stages."""
        try:
            while self.waiting or self.under_way or self.made:
                self._begin_what_can_be()
                if self.under_way:
                    self._take_in(self.engine.next())
                else:
                    self._judge()
        except BaseException:
            self.walk.outcome.elsewhere = tuple(self.under_way)
            raise

    def _begin_what_can_be(self) -> None:
        for planned in tuple(self.waiting):
            if not self._all_is_known(planned):
                continue
            if self.walk.outcome.skips(planned):
                self.waiting.remove(planned)
            elif self._has_place(planned):
                self.waiting.remove(planned)
                with self.walk.outcome.noting(planned.name):
                    self._begin(planned)

    def _all_is_known(self, planned: PlannedStage) -> bool:
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
        return self.walk.store.entry(self.walk.parts(planned)).path

    def _begin(self, planned: PlannedStage) -> None:
        walk, name = self.walk, planned.name
        sought = walk.seek(name, walk.parts(planned))
        if not sought.reason:
            self.made[name] = sought
        elif undisturbed(planned.stage):
            self.made[name] = walk.keep(sought, *walk.making(planned, sought)(walk.progress))
        else:
            self.engine.begin(walk.making(planned, sought))
            self.under_way[name] = sought

    def _take_in(self, made: Made) -> None:
        with self.walk.outcome.noting(made.name):
            sought = self.under_way.pop(made.name)
            if made.error:
                raise made.error
            artifact = Artifact.at(sought.entry.artifact_path)
            self.made[made.name] = self.walk.keep(sought, artifact, made.seconds, made.recorded)

    def _judge(self) -> None:
        """Judge all that has been made, in the plan's order."""
        for planned in self.walk.plan.stages:
            if planned.name in self.made:
                with self.walk.outcome.noting(planned.name):
                    self.walk.judge(planned, self.made.pop(planned.name))
