"""What became of stages that did not pass, and of those that wait for them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, GateRefused
from pipelines.planning.plan import SOURCE, Plan, PlannedStage
from pipelines.results.schema import FailureReport, SkippedReport
from pipelines.runner import events
from pipelines.system import signals
from pipelines.system.signals import INTERRUPTED, only_signals_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelines.runner.events import EventListener


@dataclass
class RunOutcome:
    """The stages of a run that did not pass; the others go on."""

    plan: Plan
    emit: EventListener
    at: str = ""
    """The stage that this process is busy with; empty between stages."""
    elsewhere: tuple[str, ...] = ()
    """Stages that others were making for it when the run was ended."""
    errors: dict[str, CompressError] = field(default_factory=dict)
    """By stage name; those of gates that refused too."""
    failures: dict[str, FailureReport] = field(default_factory=dict)
    skipped: dict[str, SkippedReport] = field(default_factory=dict)

    @contextmanager
    def record_failures(self, name: str) -> Iterator[None]:
        """Be at a stage during a block, and keep its error from ending the run.

        An interruption ends it, and whatever else is no error of the toolkit's.
        """
        self.at = name
        try:
            with only_signals_interrupt():
                yield
        except CompressError as error:
            if signals.exit_code():
                raise
            self.at, self.errors[name] = "", error
            if not self.refused(name):
                self._fail(name, str(error), ends_run=False)
        self.at = ""

    def should_skip(self, planned: PlannedStage) -> bool:
        """Whether a stage cannot run, once all that it needs has come to an end; it is told why."""
        because = self._stopper(planned)
        if because:
            left_out = SkippedReport(**self._described(planned.name), because=because)
            self.skipped[planned.name] = left_out
            self.emit(events.stage_skipped_event(left_out))
        return because is not None

    def _stopper(self, planned: PlannedStage) -> str | None:
        """Return the name of the stage that keeps another one from running, if any does."""
        if self.plan.baseline in self.failures:
            return self.plan.baseline  # nothing is measured without it
        for name in planned.needs:
            if name in self.errors:
                return name
            if name in self.skipped:
                return self.skipped[name].because
        return None

    def refused(self, name: str) -> bool:
        """Whether a stage did its work and a gate refused the result."""
        return isinstance(self.errors.get(name), GateRefused)

    def error(self) -> CompressError | None:
        """Return the error that decides how a run ends, with the others as its notes.

        The first stage that failed, in the plan's order; else the first that a gate refused.
        """
        found = [self.errors[name] for name in self.plan.ordered(self.errors)]
        found.sort(key=lambda error: isinstance(error, GateRefused))
        for other in found[1:]:
            found[0].add_note(str(other))
        return found[0] if found else None

    def end(self, error: str) -> None:
        """Note that a run was ended by an error while stages were under way.

        Args:
            error: that of the stage that this process is busy with.
        """
        for name in self.plan.ordered({self.at, *self.elsewhere}):
            self._fail(name, error if name == self.at else INTERRUPTED, ends_run=True)

    def interrupted(self) -> list[str]:
        """Return the names of the stages that were under way when the run was interrupted."""
        return [name for name, f in self.failures.items() if f.status == INTERRUPTED]

    def _fail(self, name: str, error: str, *, ends_run: bool) -> None:
        failure = self.failures[name] = FailureReport(**self._described(name), error=error)
        self.emit(events.stage_failed_event(failure, ends_run))

    def _described(self, name: str) -> dict[str, Any]:
        stage = self.plan.stage(name).stage.stage if name != SOURCE else SOURCE
        return {"name": name, "stage": stage, "branch": self.plan.branch(name)}
