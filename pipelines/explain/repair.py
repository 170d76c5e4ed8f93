"""Tries repairs by ordinary runs, until one passes all gates of the pipeline.

A repair changes settings of the stage that loses most, never a limit. Each is run from the nearest
cached stage, with the store of the refused run, and judged by every gate.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.config import first_problem
from compress.common.errors import CompressError
from compress.core.gates import gate_class
from compress.pipelines.api import Pipeline
from compress.pipelines.config.matrix import expand_matrices
from compress.pipelines.config.pipeline import relocated
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.config.yaml_source import Source
from compress.pipelines.explain.explain import Explained, explain_run
from compress.pipelines.results.explanation import Explanation, TriedRepair
from compress.pipelines.results.schema import Report, remove_report
from compress.pipelines.system import yaml_core
from compress.pipelines.system.jsonl_log import log_event

if TYPE_CHECKING:
    from compress.core.diagnosis.cause import Repair
    from compress.core.verdict import Verdict
    from compress.pipelines.explain.finished_run import FinishedRun

Edits = dict[str, dict[str, Any]]  # stage → changed settings
FOLDER, TRIED = "repair", "tried"
"""In the run's folder: the repaired pipeline, and the runs of all repairs that were tried."""
REPAIRED, DIFFERENCE = "pipeline.yaml", "repair.diff"
STORE = ".store"
KEPT = ("name", "input", "gates")  # what a stage keeps that becomes another one
PAIRED = 4  # single changes of which pairs are tried: those after which least was lost
BUILT_ON = 2  # changes that mend a refusal and leave another one, on which further ones are tried


@dataclass
class RepairSearch:
    """A search for changed settings with which a refused pipeline passes."""

    run: FinishedRun
    deadline: float
    """On the clock of :func:`time.monotonic`."""
    announce: Callable[[str], None]
    trains: bool = False
    finds_best: bool = False
    """Whether the search goes on for the fastest of those that pass."""
    tried: list[tuple[Explained, TriedRepair]] = field(default_factory=list)
    """Each repair that was tried, with the verdict of the refused run that it began with."""

    def search(
        self, run: FinishedRun, explained: Sequence[Explained], kept: Edits, root: Explained | None
    ) -> bool:
        """Try single changes and then pairs, until one passes beside those that are kept.

        Where a change mends one refusal and another one stays, or a later stage now refuses, what
        is left is explained in turn, its repairs tried beside that change. Returns whether to end.
        """
        built_on = 0
        for each in explained:
            tried: list[TriedRepair] = []
            for repair in self._in_turn(each, tried):
                if time.monotonic() > self.deadline:
                    return False
                found = self.run_repaired(each, repair, kept)
                tried.append(found)
                self.tried.append((root or each, found))
                outcome = "passes" if found.passed else found.error
                self.announce(f"{found.name}: {outcome}")
                log_event("repair_tried", f"{found.name}: {outcome}", settings=found.settings)
                if found.passed and not self.finds_best:
                    return True
                if built_on < BUILT_ON and self._mends(run, each, found):
                    built_on += 1
                    left = self._explained_anew(found)
                    if left and self.search(*left, found.edits, root or each):
                        return True
        return False

    @property
    def found(self) -> TriedRepair | None:
        """The fastest repair with which all gates pass; None where there is none."""
        passed = [tried for _, tried in self.tried if tried.passed]
        return min(passed, key=lambda tried: tried.latency_ms or float("inf"), default=None)

    def with_tried(self, explained: Explained) -> Explanation:
        """Return an explanation with the repairs that were tried for it."""
        tried = tuple(tried for root, tried in self.tried if root is explained)
        return explained.explanation.model_copy(update={"tried": tried})

    def allowed(self, explained: Explained) -> list[Repair]:
        """Return the repairs of a verdict, the cheapest first, without those that may not train."""
        return [repair for repair in explained.repairs if self.trains or not repair.trains]

    def _in_turn(self, explained: Explained, tried: Sequence[TriedRepair]) -> Iterator[Repair]:
        repairs = self.allowed(explained)
        yield from repairs
        known = {str(dict(repair.settings)): repair for repair in repairs}
        measured = [t for t in tried if t.value is not None]
        nearest = sorted(measured, key=lambda t: excess(explained, t))
        singles = [known[str(t.settings)] for t in nearest[:PAIRED] if not t.passed]
        for one, other in combinations(singles, 2):
            if (both := one.joined(other)) is not None:
                yield both

    def _mends(self, run: FinishedRun, explained: Explained, tried: TriedRepair) -> bool:
        """Whether a change mends its refusal, and no gate now refuses that passed before."""
        if tried.passed or not tried.verdicts or not excess(explained, tried) <= 0:
            return False
        before = [(s.name, v) for s in run.report.stages for v in s.verdicts]
        after = [(name, v) for name, verdicts in tried.verdicts.items() for v in verdicts]
        passed = {(name, v.gate, v.rule) for name, v in before if v.passed}
        refused = {(name, v.gate, v.rule) for name, v in after if not v.passed}
        return not passed & refused

    def _explained_anew(self, tried: TriedRepair) -> tuple[FinishedRun, list[Explained]] | None:
        """Explain what a changed pipeline is refused for; None where that cannot be explained."""
        try:
            pipeline = self._pipeline(tried.edits)
            run = self.run.with_pipeline(pipeline, self._folder(len(self.tried)))
            return run, explain_run(run, None, None, self.deadline)
        except CompressError:
            return None

    @property
    def nearest(self) -> TriedRepair | None:
        """The repair after which the refused gate misses its limit by least."""
        return min(self.tried, key=lambda pair: excess(*pair), default=(None, None))[1]

    def _folder(self, number: int) -> Path:
        return self.run.out / FOLDER / TRIED / str(number)

    def run_repaired(
        self, explained: Explained, repair: Repair, kept: Edits | None = None
    ) -> TriedRepair:
        """Run the pipeline with a change beside those `kept`, and judge it by all gates."""
        began = time.monotonic()
        settings, stage = dict(repair.settings), str(explained.explanation.culprit)
        tried = TriedRepair(settings=settings, stage=stage, beside=kept or {}, passed=False)
        folder = self._folder(len(self.tried) + 1)
        try:
            pipeline = self._pipeline(tried.edits)
        except ValidationError as invalid:
            return tried.model_copy(update={"error": first_problem(invalid)})
        folder.mkdir(parents=True, exist_ok=True)
        remove_report(folder)  # of an earlier search: an invalid pipeline leaves none
        report, error = self._run(pipeline, folder)
        if report and any(v.value is None for s in report.stages for v in s.verdicts):
            # A time that a busy machine hid may be measurable now; all else comes from the store.
            report, error = self._run(pipeline, folder)
        if report is None:
            return tried.model_copy(update={"error": error})
        verdicts = {stage.name: stage.verdicts for stage in report.stages if stage.verdicts}
        last = report.stages[-1].measurements if report.stages else None
        refused = _same_verdict(explained, verdicts)
        changes: dict[str, Any] = {
            "passed": report.status == "passed",
            "verdicts": verdicts,
            "value": refused.value if refused else None,
            "latency_ms": last.latency_ms.p50 if last else None,
            "bytes": last.bytes if last else None,
            "error": error,
            "seconds": round(time.monotonic() - began, 2),
        }
        return tried.model_copy(update=changes)

    def _run(self, pipeline: Pipeline, folder: Path) -> tuple[Report | None, str]:
        cache, judge = self.run.out / STORE, self.run.report.judged
        # What is chosen by its score on `test` would be worse on other samples.
        options = RunOptions(cache=cache, test=False, judge=judge, progress=self.run.state.progress)
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

    def _index(self, stage: str) -> int:
        """Return the place of a stage in the file, before a matrix is expanded."""
        index = self.run.state.plan.stage(stage).index
        return int(self._source.written(("stages", index))[1])

    def _pipeline(self, edits: Edits) -> Pipeline:
        """Return the pipeline with changed settings; raise ValidationError if they do not fit."""
        content = self._source.unexpanded or self._source.content
        for stage, settings in edits.items():
            content = changed_content(content, self._index(stage), settings)
        source = expand_matrices(Source(self._source.path, content, self._source.lines))
        pipeline = Pipeline.model_validate({"name": source.path.stem, **source.content})
        pipeline._source = source  # paths are relative to its file
        return pipeline

    def write(self, found: TriedRepair, *, apply: bool) -> None:
        """Write the repaired pipeline and a diff; with `apply` change the original file, too."""
        original, folder = self._source.path, self.run.out / FOLDER
        before = after = original.read_text(encoding="utf-8")
        for stage, settings in found.edits.items():
            after = changed_text(after, self._index(stage), settings)
        old, new = (text.splitlines(keepends=True) for text in (before, after))
        difference = difflib.unified_diff(old, new, str(original), f"{original} (repaired)")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / DIFFERENCE, "".join(difference))
        content = {"name": original.stem, **yaml_core.load(after)}
        moved = relocated(content, original.parent, folder)
        write_atomically(folder / REPAIRED, yaml_core.dump(moved))
        if apply:
            write_atomically(original, after)


def excess(explained: Explained, tried: TriedRepair) -> float:
    """Return by how much a refused gate still misses its limit after a change."""
    verdict = _same_verdict(explained, tried.verdicts)
    if verdict is None or verdict.value is None:
        return float("inf")
    missed = verdict.value - explained.judged.verdict.limit
    return -missed if gate_class(verdict.gate).higher_passes else missed


def _same_verdict(refusal: Explained, verdicts: Mapping[str, Sequence[Verdict]]) -> Verdict | None:
    refused = refusal.judged.verdict
    for verdict in verdicts.get(refusal.judged.report.name, ()):
        if (verdict.gate, verdict.rule, verdict.on) == (refused.gate, refused.rule, refused.on):
            return verdict
    return None


def changed_content(
    content: Mapping[str, Any], index: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a file's content with other settings of the stage at an index; None removes one."""
    stages = [dict(stage) for stage in content["stages"]]
    stage = stages[index]
    if "stage" in settings:
        # Others may name it by its kind.
        kept = {"name": stage["stage"], **{k: stage[k] for k in KEPT if k in stage}}
        stages[index] = {"stage": settings["stage"], **kept, **settings}
    else:
        stages[index] = {**stage, **settings}
    stages[index] = {name: value for name, value in stages[index].items() if value is not None}
    return {**content, "stages": stages}


def changed_text(text: str, index: int, settings: Mapping[str, Any]) -> str:
    """Return a file's text with a stage's settings changed; comments and order stay."""
    wanted = changed_content(yaml_core.load(text), index, settings)
    try:
        edited = _with_lines(text, index, settings)
        if yaml_core.load(edited) == wanted:
            return edited
    except (yaml.YAMLError, StopIteration, ValueError, KeyError):
        pass
    return yaml_core.dump(wanted)  # written anew: its lines cannot be changed one by one


def _with_lines(text: str, index: int, settings: Mapping[str, Any]) -> str:
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    stages = next(value for key, value in root.value if key.value == "stages")
    stage = stages.value[index]
    changes: list[tuple[int, int, str]] = []
    known = {key.value: value for key, value in stage.value}
    keys = {key.value: key for key, _ in stage.value}
    for name in settings.keys() & known.keys():
        start, end = known[name].start_mark.index, known[name].end_mark.index
        if settings[name] is not None:
            changes.append((start, end, yaml_core.dump_on_one_line(settings[name])))
        elif stage.flow_style:  # it is not the first: that is the stage's kind or name
            changes.append((text.rindex(",", 0, keys[name].start_mark.index), end, ""))
        else:  # its whole line
            start = text.rindex("\n", 0, keys[name].start_mark.index)
            changes.append((start, _line_end(text, end), ""))
    added = {k: v for k, v in settings.items() if k not in known and v is not None}
    if stage.flow_style:
        place, separator = stage.end_mark.index - 1, ", "  # before the brace
    elif added:  # behind the line of `stage:`, which may be merged, at the same indentation
        place = _line_end(text, known["stage"].end_mark.index)
        separator = "\n" + " " * stage.value[0][0].start_mark.column
    if added:
        lines = (f"{separator}{k}: {yaml_core.dump_on_one_line(v)}" for k, v in added.items())
        changes.append((place, place, "".join(lines)))
    for start, end, replacement in sorted(changes, reverse=True):
        text = text[:start] + replacement + text[end:]
    return text


def _line_end(text: str, start: int) -> int:
    found = text.find("\n", start)
    return len(text) if found < 0 else found  # the last line may have no end
