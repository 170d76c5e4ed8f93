"""What became of stages that did not pass, and of those that wait for them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compress.core.errors import CompressError, GateRefused
from pipelines import interruption
from pipelines.plan import SOURCE, Plan, PlannedStage
from pipelines.report import FailureReport, SkippedReport

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Outcome:
    """The errors of a run's stages; the others go on."""

    plan: Plan
    errors: dict[str, CompressError] = field(default_factory=dict)
    """By stage name."""

    @contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """Keep a stage's error within a block from ending the run; an interruption ends it."""
        try:
            yield
        except CompressError as error:
            if interruption.exit_code():
                raise
            self.errors[name] = error

    def stopper(self, planned: PlannedStage) -> str | None:
        """Return the name of the stage that keeps another one from running, if any does."""
        return self._stopper(planned, set())

    def _stopper(self, planned: PlannedStage, harmless: set[str]) -> str | None:
        waits_for = list(planned.needs)
        if self.plan.baseline in self.errors and not self.refused(self.plan.baseline):
            waits_for.insert(0, self.plan.baseline)  # nothing is measured without it
        for name in waits_for:
            if name in self.errors:
                return name
            if name not in (SOURCE, planned.name, *harmless):
                found = self._stopper(self.plan.stage(name), harmless)
                if found:
                    return found
        harmless.add(planned.name)  # roads that part and meet again are too many to walk each
        return None

    def refused(self, name: str) -> bool:
        """Whether a stage did its work and a gate refused the result."""
        return isinstance(self.errors.get(name), GateRefused)

    def error(self) -> CompressError | None:
        """Return the error that decides how a run ends, with the others as its notes.

        The first stage that failed, in the plan's order; else the first that a gate refused.
        """
        names = (SOURCE, *self.plan.names)
        found = [self.errors[name] for name in names if name in self.errors]
        found.sort(key=lambda error: isinstance(error, GateRefused))
        for other in found[1:]:
            found[0].add_note(str(other))
        return found[0] if found else None

    def failures_with(self, at: str, error: str, *, interrupted: bool) -> tuple[FailureReport, ...]:
        """Return the stages that failed, and the one at which a run ended, in their order."""
        stopped = at if interrupted and at not in self.errors else ""
        errors = {n: str(e) for n, e in self.errors.items() if not self.refused(n)}
        if at:
            errors.setdefault(at, error)
        return tuple(
            FailureReport(
                name=name,
                stage=self.plan.stage(name).stage.stage if name != SOURCE else SOURCE,
                branch=self.plan.branch(name),
                error=errors[name],
                status="interrupted" if name == stopped else "failed",
            )
            for name in (SOURCE, *self.plan.names)
            if name in errors
        )

    def skipped(self) -> tuple[SkippedReport, ...]:
        """Return the stages that could not run because others did not pass."""
        return tuple(self._skipped())

    def _skipped(self) -> Iterator[SkippedReport]:
        for planned in self.plan.stages:
            because = None if planned.name in self.errors else self.stopper(planned)
            if because:
                yield SkippedReport(
                    name=planned.name,
                    stage=planned.stage.stage,
                    branch=self.plan.branch(planned.name),
                    because=because,
                )
