"""Tries repairs by ordinary runs, until one passes all gates of the pipeline.

A repair changes settings of the stage that loses most, never a limit. Each is run from the nearest
cached stage, with the store of the refused run, and judged by every gate.
"""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.errors import CompressError
from compress.core.gates import gate_class
from pipelines.api import Pipeline
from pipelines.config.matrix import expand_matrices
from pipelines.config.relative_paths import relocated
from pipelines.config.run_options import RunOptions
from pipelines.config.yaml_source import Source
from pipelines.explain.edited_file import changed_content, changed_text
from pipelines.results.explanation import TriedRepair
from pipelines.results.schema import Report, remove_report
from pipelines.system.jsonl_log import log_event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from compress.core.diagnosis.cause import Repair
    from pipelines.explain.finished_run import FinishedRun
    from pipelines.explain.tested_causes import Explained
    from pipelines.results.explanation import Explanation

FOLDER, TRIED = "repair", "tried"
"""In the run's folder: the repaired pipeline, and the runs of all repairs that were tried."""
REPAIRED, DIFFERENCE = "pipeline.yaml", "repair.diff"
STORE = ".store"
PAIRED = 4
"""Single changes of which pairs are tried: those after which least was lost."""


def repair_run(
    run: FinishedRun,
    explained: Sequence[Explained],
    deadline: float,
    announce: Callable[[str], None],
    *,
    trains: bool = False,
    finds_best: bool = False,
) -> RepairSearch | None:
    """Try the repairs of the first verdict that has some; None where none has.

    Args:
        run: the run that was refused.
        explained: its verdicts.
        deadline: when no further repair is tried, on the clock of :func:`time.monotonic`.
        announce: receives a line for each repair.
        trains: whether repairs that train are tried too.
        finds_best: whether the search goes on for the fastest repair that passes.
    """
    for each in explained:
        repairs = [repair for repair in each.repairs if trains or not repair.trains]
        if repairs:
            search = RepairSearch(run, each, repairs, deadline, announce, finds_best)
            search.search()
            return search
    return None


@dataclass
class RepairSearch:
    """A search for changed settings with which a refused pipeline passes."""

    run: FinishedRun
    explained: Explained
    repairs: Sequence[Repair]
    """The cheapest first."""
    deadline: float
    """On the clock of :func:`time.monotonic`."""
    announce: Callable[[str], None]
    finds_best: bool = False
    """Whether the search goes on for the fastest of those that pass."""
    tried: list[TriedRepair] = field(default_factory=list)

    def search(self) -> None:
        """Try single changes and then pairs, until one passes."""
        for repair in self._in_turn():
            if time.monotonic() > self.deadline:
                break
            found = self.run_repaired(repair)
            self.tried.append(found)
            outcome = "passes" if found.passed else found.error
            self.announce(f"{found.name}: {outcome}")
            log_event("repair_tried", f"{found.name}: {outcome}", settings=found.settings)
            if found.passed and not self.finds_best:
                break

    @property
    def found(self) -> TriedRepair | None:
        """The fastest repair with which all gates pass; None where there is none."""
        passed = [tried for tried in self.tried if tried.passed]
        return min(passed, key=lambda tried: tried.latency_ms or float("inf"), default=None)

    def with_tried(self) -> Explanation:
        """Return the explanation with the repairs that were tried."""
        return self.explained.explanation.model_copy(update={"tried": tuple(self.tried)})

    def _in_turn(self) -> Iterator[Repair]:
        yield from self.repairs
        known = {str(dict(repair.settings)): repair for repair in self.repairs}
        nearest = sorted((t for t in self.tried if t.value is not None), key=self._excess)
        singles = [known[str(t.settings)] for t in nearest[:PAIRED] if not t.passed]
        for one, other in combinations(singles, 2):
            if (both := one.joined(other)) is not None:
                yield both

    def _excess(self, tried: TriedRepair) -> float:
        """Return by how much the refused gate still misses its limit."""
        verdict = self.explained.judged.verdict
        if tried.value is None:
            return float("inf")
        excess = tried.value - verdict.limit
        return -excess if gate_class(verdict.gate).higher_passes else excess

    @property
    def nearest(self) -> TriedRepair | None:
        """The repair after which the refused gate misses its limit by least."""
        return min(self.tried, key=self._excess, default=None)

    def run_repaired(self, repair: Repair) -> TriedRepair:
        """Run the pipeline with changed settings, and judge it by all of its gates."""
        began = time.monotonic()
        settings: dict[str, Any] = dict(repair.settings)
        folder = self.run.out / FOLDER / TRIED / str(len(self.tried) + 1)
        try:
            pipeline = self._pipeline(settings)
        except ValidationError as invalid:
            message = str(invalid.errors()[0]["msg"]).removeprefix("Value error, ")
            return TriedRepair(settings=settings, passed=False, error=message)
        folder.mkdir(parents=True, exist_ok=True)
        remove_report(folder)  # of an earlier search: an invalid pipeline leaves none
        report, error = self._run(pipeline, folder)
        if report and any(v.value is None for s in report.stages for v in s.verdicts):
            # A time that a busy machine hid may be measurable now; all else comes from the store.
            report, error = self._run(pipeline, folder)
        if report is None:
            return TriedRepair(settings=settings, passed=False, error=error)
        seconds = round(time.monotonic() - began, 2)
        verdicts = {stage.name: stage.verdicts for stage in report.stages if stage.verdicts}
        last = report.stages[-1].measurements if report.stages else None
        refused, found = self.explained.judged, None
        for verdict in verdicts.get(refused.report.name, ()):
            if (verdict.gate, verdict.rule) == (refused.verdict.gate, refused.verdict.rule):
                found = verdict.value
        return TriedRepair(
            settings=settings,
            passed=report.status == "passed",
            verdicts=verdicts,
            value=found,
            latency_ms=last.latency_ms.p50 if last else None,
            bytes=last.bytes if last else None,
            error=error,
            seconds=seconds,
        )

    def _run(self, pipeline: Pipeline, folder: Path) -> tuple[Report | None, str]:
        """Run a pipeline; return its report, None where there is none, and why it did not pass."""
        cache, progress = self.run.out / STORE, self.run.state.progress
        options = RunOptions(cache=cache, test=False, progress=progress)
        try:
            return pipeline.run(folder, options), ""
        except CompressError as failed:
            error = str(failed).partition(" (artifact kept")[0]
            try:
                return Report.read(folder), error
            except CompressError:
                return None, error

    @property
    def _source(self) -> Source:
        source = self.run.pipeline._source
        assert source is not None  # the run was made from a file
        return source

    @property
    def _index(self) -> int:
        """The place of the culprit in the file, before a matrix is expanded."""
        planned = self.run.state.plan.stage(str(self.explained.explanation.culprit))
        return int(self._source.written(("stages", planned.index))[1])

    def _pipeline(self, settings: dict[str, Any]) -> Pipeline:
        """Return the pipeline with changed settings; raise ValidationError if they do not fit."""
        written = self._source.unexpanded or self._source.content
        content = changed_content(written, self._index, settings)
        source = expand_matrices(Source(self._source.path, content, self._source.lines))
        pipeline = Pipeline.model_validate({"name": source.path.stem, **source.content})
        pipeline._source = source  # paths are relative to its file
        return pipeline

    def write(self, found: TriedRepair, *, apply: bool) -> None:
        """Write the repaired pipeline and the difference to the original.

        With `apply` the original file is changed too.
        """
        original, folder = self._source.path, self.run.out / FOLDER
        before = original.read_text(encoding="utf-8")
        after = changed_text(before, self._index, found.settings)
        difference = difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            str(original),
            f"{original} (repaired)",
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / DIFFERENCE, "".join(difference))
        content = {"name": original.stem, **yaml.safe_load(after)}
        moved = relocated(content, original.parent, folder)
        write_atomically(
            folder / REPAIRED, yaml.safe_dump(moved, sort_keys=False, allow_unicode=True)
        )
        if apply:
            write_atomically(original, after)
