"""Running a pipeline, or foreseeing what a run would do."""

from __future__ import annotations

import functools
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, GateRefused
from compress.common.process import within_quota
from compress.core.progress import silent
from compress.profiling.peak_memory import measurement_process
from pipelines.executors.factory import check_engine, engine_for
from pipelines.executors.launched import check_processes
from pipelines.executors.node_environment import write_run_id
from pipelines.planning.loss_and_metric import settled
from pipelines.planning.plan import SOURCE, build_plan
from pipelines.results.schema import withdraw_report
from pipelines.runner import events
from pipelines.runner.executor import ASKED, PipelineExecutor
from pipelines.runner.inputs import resolve_inputs
from pipelines.runner.scheduler import schedule
from pipelines.runner.subscribers import event_listener, recording
from pipelines.store.local import Store
from pipelines.store.sample_diff import note_samples
from pipelines.system import signals
from pipelines.system.disk_errors import readable_disk_errors
from pipelines.system.jsonl_log import log_event
from pipelines.system.signals import INTERRUPTED
from pipelines.system.temp_files import temporary_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.core.progress import Progress
    from pipelines.config.pipeline import Pipeline
    from pipelines.executors.factory import EngineName
    from pipelines.results.schema import Report, Status
    from pipelines.runner.scheduler import Engine
    from pipelines.store.remote import Remote


def run(
    pipeline: Pipeline,
    out: Path,
    *,
    start: str | None,
    until: str | None,
    force: bool,
    jobs: int | None,
    engine: EngineName,
    store: str | None,
    progress: Progress,
    announce: Callable[[str], None],
    finished: Callable[[Report], None],
) -> Report:
    """Run a pipeline and write its report.

    Args:
        pipeline: the pipeline.
        out: directory of the results.
        start: run this stage again, and those whose artifacts are made of its own, whatever the
            store holds.
        until: run this stage and those that it needs alone.
        force: run every stage again.
        jobs: branches made at a time, each in a process of its own where it is more than one; by
            default one, and with Ray as many as the cluster has cores.
        engine: what makes branches: this machine, or a Ray cluster.
        store: URL of a store that other machines share; none where None.
        progress: where stages say how far they are.
        announce: where one line per stage goes.
        finished: given the report once it is written, of a refused or failed run too.

    Returns:
        The report of a run whose gates all passed.

    Raises:
        GateRefused: a gate refused and no stage failed; the report is written, and the artifact
            kept.
        CompressError: the pipeline is invalid, or a stage failed; the report says so. Where others
            did not pass either, their errors are its notes.
    """
    check_engine(pipeline, engine)
    remote = _shared(store, announce)
    plan = build_plan(pipeline, start, until, force=force)
    for warning in plan.warnings:
        announce(f"warning: {warning}")
    pipeline, data, told = resolve_inputs(pipeline)
    plan, pipeline = settled(plan, pipeline, data)
    if told:
        announce(told)
    root = out / ".store"
    with (
        readable_disk_errors(out),
        temporary_files(),
        within_quota(),
        measurement_process(),
        Store.locked(root, announce, remote, pipeline.folder, pipeline.code_folder) as kept,
    ):
        write_run_id(root)
        check_processes(pipeline, root)
        withdraw_report(out)
        walk = PipelineExecutor(pipeline, plan, out, kept, data, progress, event_listener(announce))
        if walk.contents:
            note_samples(root, walk.contents)
        with recording(walk):
            begin = functools.partial(engine_for, engine, jobs, kept, progress)
            return _execute(walk, begin, finished)


def _execute(
    walk: PipelineExecutor, begin: Callable[[], Engine | None], finished: Callable[[Report], None]
) -> Report:
    """Walk from end to end, and write the report of however it ends."""
    began = time.monotonic()
    walk.emit(events.run_started_event(walk))
    for warning in walk.plan.warnings:  # told to people before there was a walk
        log_event("message", warning, level="warning")
    for warning in walk.doubts_of_val:
        walk.emit(events.warned(warning))
    try:
        with readable_disk_errors(walk.out):
            schedule(walk, begin())
            walk.test()
            report = walk.report("passed")
            report.write(walk.out)
    except BaseException as error:
        report = _report_of(walk, error)
        with suppress(OSError):  # on a full disk the error itself matters more
            report.write(walk.out)
        _end(walk, report, began)
        if report.status != INTERRUPTED and isinstance(error, CompressError):
            finished(report)
        raise
    _end(walk, report, began)
    finished(report)
    return report


def _end(walk: PipelineExecutor, report: Report, began: float) -> None:
    """Log the warnings of a report, and that the run has ended."""
    for warning in report.warnings:
        if warning not in walk.doubts_of_val:  # they were logged when it began
            log_event("message", warning, level="warning")
    walk.emit(events.run_finished_event(report, time.monotonic() - began))


def _report_of(walk: PipelineExecutor, error: BaseException) -> Report:
    """Return the report of a walk that an error ended; an interruption learns where it came."""
    if not signals.exit_code() and isinstance(error, Exception):
        status: Status = "refused" if isinstance(error, GateRefused) else "failed"
        words = str(error) or type(error).__name__
        walk.outcome.end(words)
        return walk.report(status, words)
    walk.outcome.end(INTERRUPTED)
    return walk.report(INTERRUPTED, signals.note(error, walk.outcome.interrupted()))


def preview_run(
    pipeline: Pipeline,
    out: Path,
    *,
    start: str | None,
    until: str | None,
    force: bool,
    store: str | None = None,
) -> dict[str, str]:
    """Return for each stage ``cached``, or why it would run; nothing is run.

    Raises:
        CompressError: the pipeline is invalid.
    """
    return preview_state(pipeline, out, start=start, until=until, force=force, store=store)[0]


def preview_state(
    pipeline: Pipeline,
    out: Path,
    *,
    start: str | None = None,
    until: str | None = None,
    force: bool = False,
    store: str | None = None,
) -> tuple[dict[str, str], PipelineExecutor]:
    """Return what :func:`foresee` does, and a walk that holds what is cached.

    Raises:
        CompressError: the pipeline is invalid.
    """
    remote = _shared(store, lambda line: None)
    plan = build_plan(pipeline, start, until, force=force)
    pipeline, data, _ = resolve_inputs(pipeline)
    plan, pipeline = settled(plan, pipeline, data)
    kept = Store(out / ".store", remote, folder=pipeline.folder, code=pipeline.code_folder)
    kept.refuse_another_format()
    if remote:
        remote.refuse_another_format()
    walk = PipelineExecutor(pipeline, plan, out, kept, data, silent, lambda happening: None)
    foreseen: dict[str, str] = {}

    def look(name: str, parts: dict[str, Any]) -> None:
        entry, again = kept.entry(parts), name in plan.again
        found = None if again else kept.peek(entry)
        if found:
            walk.artifacts[name] = found[0]
        why = ASKED if again else kept.explain_miss(name, parts, walk.contents)
        origin = f" (from {entry.fetched_from})" if entry.fetched_from else ""
        foreseen[name] = f"cached{origin}" if found else f"runs ({why})"

    look(SOURCE, walk.source_parts())
    for planned in plan.stages:
        missing = [n for n in planned.reads if n not in walk.artifacts]
        if missing:
            why = ASKED if planned.name in plan.again else f"after {missing[0]}"
            foreseen[planned.name] = f"runs ({why})"
        else:
            look(planned.name, walk.cache_key_parts(planned))
    return foreseen, walk


def _shared(store: str | None, announce: Callable[[str], None]) -> Remote | None:
    if store is None:
        return None
    from pipelines.store.remote import Remote

    return Remote(store, announce)
