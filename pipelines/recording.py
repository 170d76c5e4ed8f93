"""What is recorded of a run while it is walked: its log, and its tracker's figures."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from compress.core.errors import GateRefused
from pipelines import interruption
from pipelines.events import LOG, LogFile, happened, heard_by
from pipelines.machine import machine, versions
from pipelines.report import how_to_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipelines.pipeline import Pipeline
    from pipelines.report import StageReport, Status
    from pipelines.walk import Walk

RUNNING = re.compile(r"(?P<stage>\S+): running \((?P<reason>.*)\)", re.DOTALL)
"""What a walk announces of a stage that it begins to make."""


@contextmanager
def recorded(pipeline: Pipeline, out: Path) -> Iterator[Callable[[Walk], None]]:
    """Record the walk that is given during a block, to its end; nothing here decides a result."""
    recording = Recording(pipeline, out)
    with ExitStack() as stack:
        stack.enter_context(heard_by(LogFile(out / LOG, recording.run, recording.at)))
        if pipeline.tracker is not None:
            from pipelines.tracked import tracked

            stack.enter_context(tracked(pipeline.tracker, out, pipeline.name, recording.run))
        try:
            yield recording.follow
        except BaseException as error:
            recording.end(error)
            raise
        recording.end(None)


class Recording:
    """Turns what a walk announces and reports into events."""

    def __init__(self, pipeline: Pipeline, out: Path) -> None:
        """Begin a run of its own name."""
        self.pipeline, self.out = pipeline, out
        self.run, self.began = uuid.uuid4().hex[:12], time.monotonic()
        self.walk: Walk | None = None
        self.told = 0

    def at(self) -> str:
        """Return the name of the stage that is being walked; empty between stages."""
        return self.walk.at if self.walk else ""

    def follow(self, walk: Walk) -> None:
        """Tell from here on what a walk does."""
        self.walk, announce = walk, walk.announce
        happened(
            "run_started",
            f"{self.pipeline.name}: started",
            pipeline=self.pipeline.name,
            command=how_to_run(self.pipeline.file, self.out),
            versions=dict(versions()),
            machine=dict(machine()),
            settings=self.pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True),
        )
        for warning in walk.plan.warnings:  # told to people before there was a walk
            happened("message", warning, level="warning")

        def announced(line: str) -> None:
            self._look(line)
            announce(line)

        walk.announce = announced

    def end(self, error: BaseException | None) -> None:
        """Tell how it ended."""
        if self.walk is None:
            return
        self._tell_rows()
        why = "" if error is None else str(error) or "interrupted"
        report = self.walk.report(status_of(error), why)
        for failure in report.failures:
            found = failure.error.removeprefix(f"{failure.name}: ")
            happened(
                "stage_failed",
                f"{failure.name}: {failure.status}: {found}",
                level="error",
                stage=failure.name,
                error=failure.error,
            )
        for skipped in report.skipped:
            words = f"{skipped.name}: skipped, as {skipped.because} did not pass"
            happened("stage_skipped", words, level="warning", stage=skipped.name)
        happened(
            "run_finished",
            f"{self.pipeline.name}: {report.status}",
            level="info" if report.status == "passed" else "error",
            stage=None,
            status=report.status,
            error=report.error,
            seconds=time.monotonic() - self.began,
            test=report.test.values if report.test else {},
        )

    def _look(self, line: str) -> None:
        found = RUNNING.fullmatch(line)
        if found:
            happened("stage_started", line, **found.groupdict())
        elif not self._tell_rows():
            happened("message", line)

    def _tell_rows(self) -> bool:
        """Tell of the stages that were finished meanwhile; return whether there were any."""
        rows = self.walk.rows[self.told :] if self.walk else []
        self.told += len(rows)
        for row in rows:
            _tell_row(row)
        return bool(rows)


def _tell_row(row: StageReport) -> None:
    happened(
        "stage_cached" if row.cached else "stage_finished",
        row.line(),
        stage=row.name,
        seconds=row.seconds,
        judged_seconds=row.judged_seconds,
        kind=row.artifact.kind,
        digest=row.artifact.digest,
        measurements=row.measurements.model_dump(mode="json"),
    )
    for verdict in row.verdicts:
        happened(
            "gate_judged",
            f"{row.name}: {verdict.gate} {'passed' if verdict.passed else 'refused'}",
            level="info" if verdict.passed else "error",
            stage=row.name,
            **verdict.model_dump(mode="json"),
        )


def status_of(error: BaseException | None) -> Status:
    """Return how a run ended by what it raised."""
    if error is None:
        return "passed"
    if interruption.exit_code() or not isinstance(error, Exception):
        return "interrupted"
    return "refused" if isinstance(error, GateRefused) else "failed"
