"""`compress explain` and `compress repair`: explain refusals, try repairs, and print both."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from compress.common.errors import GateRefused, PipelineInvalid
from pipelines.config.auto_settings import Seconds
from pipelines.explain.explain import explain_run
from pipelines.explain.finished_run import FinishedRun
from pipelines.explain.repair import FOLDER, RepairSearch, repair_run
from pipelines.reporting.html import render
from pipelines.results.explanation import Explanations
from pipelines.system.jsonl_log import LOG, LogFile, log_handler
from pipelines.system.temp_files import temporary_files
from pipelines.terminal.console import current_mode, notify, print_result
from pipelines.terminal.progress_bars import show_progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pipelines.explain.explain import Explained


def explain_and_print(
    directory: Path, stage: str | None = None, gate: str | None = None, time_limit: str = "3m"
) -> None:
    """Explain a run's refusals, or the gates that are named; write `explain.json` and the page.

    Raises:
        PipelineInvalid: nothing refused and no gate is named, or the time has no unit.
        GateRefused: no cause was found.
    """
    seconds = _seconds(time_limit)
    with _opened(directory) as run:
        explained = explain_run(run, stage, gate, time.monotonic() + seconds)
        found = Explanations(explanations=tuple(e.explanation for e in explained))
        _write(run, found)
    print_result(found, _lines(run, explained))
    if not any(e.explanation.causes for e in explained):
        raise GateRefused(f"{directory}: no cause was found")


def repair_and_print(
    directory: Path,
    time_limit: str = "10m",
    best: bool = False,
    trains: bool = False,
    apply: bool = False,
    prints: bool = True,
) -> None:
    """Explain a run's refusals, and try repairs until one passes all gates.

    Args:
        directory: the run's folder.
        time_limit: how long, with its unit.
        best: whether to go on for the fastest of those that pass.
        trains: whether repairs that train are tried too.
        apply: whether the pipeline file itself is changed.
        prints: whether the result is printed.

    Raises:
        PipelineInvalid: nothing refused, or the time has no unit.
        GateRefused: no repair that was tried passes; the message names the nearest.
    """
    deadline = time.monotonic() + _seconds(time_limit)
    with _opened(directory) as run:
        explained = explain_run(run, None, None, deadline)
        search = repair_run(run, explained, deadline, notify, trains=trains, finds_best=best)
        found = search.found if search else None
        written = search.write(found, apply=apply) if search and found else None
        explained = [
            e.with_tried(search.tried) if search and e is search.explained else e for e in explained
        ]
        content = Explanations(
            explanations=tuple(e.explanation for e in explained),
            chosen=None if found is None else found.settings,
        )
        _write(run, content)
    lines = [*_lines(run, explained)]
    if written is not None and search is not None:
        changed = search.file if apply else f"compress run {written}"
        lines.append(f"  written {written}, {directory / FOLDER / 'repair.diff'}   {changed}")
    if prints:
        print_result(content, lines)
    if found is None:
        raise GateRefused(_nothing_passes(directory, search))


def _nothing_passes(directory: Path, search: RepairSearch | None) -> str:
    if search is None:
        return f"{directory}: no repair is known for what was found"
    nearest = search.nearest
    tried = f"none of {len(search.tried)} repairs passes all gates"
    if nearest is None:
        return f"{directory}: {tried}"
    found = "was not judged" if nearest.value is None else f"found {nearest.value:.4g}"
    return f"{directory}: {tried}; the nearest is {nearest.name}: {found}; try more --time"


@contextmanager
def _opened(directory: Path) -> Iterator[FinishedRun]:
    """Open a finished run, with progress and its log."""
    with temporary_files(), show_progress(quiet=current_mode().silent) as (progress, _):
        run = FinishedRun.open(directory, progress)
        with log_handler(LogFile(directory / LOG, "explain", lambda: "")):
            yield run


def _write(run: FinishedRun, found: Explanations) -> None:
    found.write(run.out)
    run.report.write(run.out, render(run.report, run.out))


def _lines(run: FinishedRun, explained: Sequence[Explained]) -> Iterator[str]:
    for each in explained:
        yield from each.explanation.lines(run.rule(each.judged))


def _seconds(text: str) -> float:
    try:
        return float(TypeAdapter(Seconds).validate_python(text))
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise PipelineInvalid(f"--time {text}: {message}") from None
