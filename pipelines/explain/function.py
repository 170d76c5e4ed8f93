"""`explain` and `repair`: what both commands do, from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.core.progress import Progress, silent
from compress.pipelines.explain.explain import explain_run
from compress.pipelines.explain.finished_run import FinishedRun
from compress.pipelines.explain.repair import RepairSearch
from compress.pipelines.reporting.html import render
from compress.pipelines.results.explanation import Explanations
from compress.pipelines.system.jsonl_log import LOG, LogFile, log_handler
from compress.pipelines.system.temp_files import temporary_files


def explain(
    out: Path | str,
    stage: str | None = None,
    gate: str | None = None,
    *,
    seconds: float = 180.0,
    progress: Progress = silent,
) -> Explanations:
    """Explain a run's refusals; write `explain.json` and the page to its folder `out`.

    With the name of a `stage` or the type of a `gate`, those verdicts are explained, whether they
    passed or not. After `seconds` sets of layers are not reduced further. Raises PipelineInvalid:
    nothing refused and no gate is named; ArtifactInvalid: there is no report, or what the run made
    is not in its store any more; StageFailed: there is no data to judge by.
    """
    with _opened(Path(out), progress) as run:
        explained = explain_run(run, stage, gate, time.monotonic() + seconds)
        found = Explanations(explanations=tuple(e.explanation for e in explained))
        _write(run, found)
    return found


def repair(
    out: Path | str,
    *,
    seconds: float = 600.0,
    best: bool = False,
    trains: bool = False,
    apply: bool = False,
    progress: Progress = silent,
    announce: Callable[[str], None] = lambda line: None,
) -> Explanations:
    """Explain a run's refusals, and try repairs until one passes all gates; `chosen` is that one.

    None is begun after `seconds`. With `best` the search goes on for the fastest that passes, with
    `trains` also by those that train; with `apply` the pipeline file itself is changed. `announce`
    receives a line for each repair. Raises as :func:`explain`.
    """
    deadline = time.monotonic() + seconds
    with _opened(Path(out), progress) as run:
        explained = explain_run(run, None, None, deadline)
        search = RepairSearch(run, deadline, announce, trains=trains, finds_best=best)
        search.search(run, explained, {}, None)
        if search.found is not None:
            search.write(search.found, apply=apply)
        found = Explanations(
            explanations=tuple(search.with_tried(each) for each in explained),
            chosen=None if search.found is None else search.found.edits,
            nearest=None if search.nearest is None else search.nearest.name,
        )
        _write(run, found)
    return found


@contextmanager
def _opened(out: Path, progress: Progress) -> Iterator[FinishedRun]:
    with temporary_files():
        run = FinishedRun.open(out, progress)
        with log_handler(LogFile(out / LOG, "explain", lambda: "")):
            yield run


def _write(run: FinishedRun, found: Explanations) -> None:
    found.write(run.out)
    run.report.write(run.out, render(run.report, run.out))
