"""Runs a pipeline, or predicts what a run would do."""

from __future__ import annotations

import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, GateRefused
from compress.common.process import import_modules, within_quota
from compress.core.progress import silent
from compress.core.stage import members_of
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.executors.engines import check_engine, engine_for
from compress.pipelines.executors.launched import check_processes, write_run_id
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.results.schema import remove_report, rerun_command
from compress.pipelines.runner.cache_keys import source_key_parts, stage_key_parts
from compress.pipelines.runner.executor import RERUN_REQUESTED, PipelineExecutor, schedule
from compress.pipelines.runner.remembered import INPUTS_FILE, load_inputs, variables_noted
from compress.pipelines.runner.run_report import build_report
from compress.pipelines.runner.run_state import RunState
from compress.pipelines.store.local import Store, note_samples
from compress.pipelines.system import signals
from compress.pipelines.system.error_context import readable_disk_errors
from compress.pipelines.system.jsonl_log import (
    LOG,
    LogFile,
    RunEvent,
    event_listener,
    log_event,
    log_handler,
)
from compress.pipelines.system.machine_info import machine, versions
from compress.pipelines.system.run_profile import Profiler
from compress.pipelines.system.signals import INTERRUPTED
from compress.pipelines.system.temp_files import temporary_files
from compress.profiling.peak_memory import fork_worker, measurement_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.results.schema import Report, Status
    from compress.pipelines.store.remote import Remote
    from compress.pipelines.system.jsonl_log import Level

DEFAULTS = RunOptions()
COUNTED_WITH = ("torch._dynamo",)
"""What torch imports when multiply-accumulates are counted."""


def run(
    pipeline: PipelineConfig,
    out: Path,
    options: RunOptions,
    render: Callable[[Report, Path], str],
) -> Report:
    """Run a pipeline and write its report; return it where all gates passed.

    `render` makes the text of `report.html` from the report and `out`.

    Raises:
        GateRefused: a gate refused and no stage failed; the report is written, and the artifact
            kept.
        CompressError: the pipeline is invalid, or a stage failed; the report says so. Where others
            did not pass either, their errors are its notes.
    """
    check_engine(pipeline, options.engine)
    announce, root = options.announce, options.cache or out / ".store"
    profiler = Profiler(is_on=options.profile)
    remote = _open_remote(options.store, announce)
    plan = build_plan(pipeline, options.start, options.until, force=options.force)
    for warning in plan.warnings:
        announce(f"warning: {warning}")
    folder, code = pipeline.folder, pipeline.code_folder
    store = Store(root, remote, folder=folder, code=code, announce=announce)
    inputs = load_inputs(pipeline, plan, root / INPUTS_FILE, store.surroundings)
    pipeline, plan = _judged(inputs.pipeline, options), inputs.plan
    if inputs.inferred:
        announce(inputs.inferred)
    with (
        readable_disk_errors(out),
        temporary_files(),
        within_quota(),
        measurement_process(),
        store.locked(),
        ExitStack() as log_handlers,
    ):
        write_run_id(root)
        # Refused before the last report is removed.
        check_processes(pipeline, root)
        remove_report(out)
        emit = event_listener(announce)
        state = RunState(pipeline, plan, out, store, inputs.data, options.progress, emit)
        state.profiler = profiler
        if inputs.data_warnings is not None:
            state.data_warnings = inputs.data_warnings
        stages = [planned.name for planned in plan.stages]
        if options.measured == "last":
            state.unmeasured = frozenset(stages[:-1])
        elif options.measured == "none":
            state.unmeasured = frozenset((SOURCE, *stages))
        elif state.is_quick:
            state.unmeasured = frozenset((SOURCE, *stages)) - {*plan.leaves}
        if state.contents:
            note_samples(root, state.contents)
            inputs.keep(state.contents, state.data_warnings, store.surroundings)
        run_id = uuid.uuid4().hex[:12]
        log = LogFile(out / LOG, run_id, lambda: state.outcome.current)
        log_handlers.enter_context(log_handler(log))
        if pipeline.tracker is not None:
            from compress.pipelines.runner.trackers import tracked

            tracker = tracked(pipeline.tracker, out, pipeline.name, run_id)
            log_handlers.enter_context(tracker)
        return _execute(state, options, render)


@contextmanager
def forked_measurement_process(
    pipeline: PipelineConfig, out: Path, options: RunOptions
) -> Iterator[None]:
    """Measure memory in a fork of this process within a block, begun before anything is computed.

    Only for a process that has imported this toolkit and done nothing else, such as the command's.
    """
    plan = build_plan(pipeline, options.start, options.until, force=options.force)
    store = options.cache or out / ".store"
    with variables_noted(), ExitStack() as stack:
        if not store.exists():  # nothing is cached: this process is going to import them too
            kinds = {kind for p in plan.stages for kind in members_of(p.stage.writes())}
            import_modules([*COUNTED_WITH, *(name for kind in kinds for name in kind.opened_with)])
        # Else nothing may have to be measured, and then nothing needs torch.
        if not (store / INPUTS_FILE).exists():
            stack.enter_context(measurement_process())
            fork_worker()
        yield


def _execute(state: RunState, options: RunOptions, render: Callable[[Report, Path], str]) -> Report:
    """Execute all stages, and write the report however the run ends."""
    began = time.monotonic()
    pipeline = state.pipeline
    fields = {
        "pipeline": pipeline.name,
        "command": rerun_command(pipeline.file, state.out, pipeline.judge),
        "versions": dict(versions()),
        "machine": dict(machine()),
        "settings": pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    line = f"{pipeline.name}: started"
    state.emit(RunEvent("run_started", None, line, fields, is_announced=False))
    if state.plan.task_line:
        state.emit(RunEvent("task_known", None, state.plan.task_line))
    for warning in state.plan.warnings:  # announced before the log was there
        log_event("message", warning, level="warning")
    for warning in state.data_warnings:
        state.emit(RunEvent("message", None, f"warning: {warning}", level="warning"))
    try:
        with readable_disk_errors(state.out):
            executor = PipelineExecutor(state)
            engine = engine_for(options.engine, options.jobs, state.store, options.progress)
            schedule(executor, engine)
            if options.test and not state.is_quick:
                executor.evaluate_test_split()
            report = build_report(state, "passed")
            report.write(state.out, render(report, state.out))
    except BaseException as error:
        if not signals.exit_code() and isinstance(error, Exception):
            status: Status = "refused" if isinstance(error, GateRefused) else "failed"
            message = str(error) or type(error).__name__
            state.outcome.abort(message)
        else:
            status = INTERRUPTED
            state.outcome.abort(INTERRUPTED)
            # The note on the interruption tells the command line which stages it came at.
            message = signals.add_interruption_note(error, state.outcome.interrupted())
        report = build_report(state, status, message)
        with suppress(OSError):  # on a full disk the error itself matters more
            report.write(state.out, render(report, state.out))
        _log_end(state, report, time.monotonic() - began)
        if report.status != INTERRUPTED and isinstance(error, CompressError):
            options.finished(report)
        raise
    _log_end(state, report, time.monotonic() - began)
    options.finished(report)
    return report


def _log_end(state: RunState, report: Report, seconds: float) -> None:
    """Log the warnings of the report, and that the run has ended."""
    for warning in report.warnings:
        if warning not in state.data_warnings:  # those were logged at the start
            log_event("message", warning, level="warning")
    fields = {
        "status": report.status,
        "error": report.error,
        "seconds": seconds,
        "test": report.test.values if report.test else {},
    }
    level: Level = "info" if report.status == "passed" else "error"
    line = f"{report.pipeline}: {report.status}"
    state.emit(RunEvent("run_finished", None, line, fields, level, is_announced=False))


def preview_run(
    pipeline: PipelineConfig, out: Path, options: RunOptions = DEFAULTS
) -> dict[str, str]:
    """Return for each stage `cached`, or why it would run; nothing is run."""
    return preview_state(pipeline, out, options, loaded=False)[0]


def preview_state(
    pipeline: PipelineConfig, out: Path, options: RunOptions = DEFAULTS, *, loaded: bool = True
) -> tuple[dict[str, str], RunState]:
    """Return what :func:`preview_run` does, and the state of a run that holds what is cached."""
    remote = _open_remote(options.store, lambda line: None)
    plan = build_plan(pipeline, options.start, options.until, force=options.force)
    store = Store(
        options.cache or out / ".store", remote, folder=pipeline.folder, code=pipeline.code_folder
    )
    inputs = load_inputs(pipeline, plan, store.root / INPUTS_FILE, store.surroundings)
    pipeline, plan, data = _judged(inputs.pipeline, options), inputs.plan, inputs.data
    store.refuse_another_format()
    if remote:
        remote.refuse_another_format()
    state = RunState(pipeline, plan, out, store, data, silent, lambda event: None)
    actions: dict[str, str] = {}

    def preview(name: str, parts: dict[str, Any]) -> None:
        entry, rerun = store.entry(parts), name in plan.again
        found = None if rerun else store.peek(entry)
        if found:
            state.artifacts[name] = found[0]
            origin = f" (from {entry.fetched_from})" if entry.fetched_from else ""
            actions[name] = f"cached{origin}"
        else:
            why = RERUN_REQUESTED if rerun else store.explain_miss(name, parts, state.contents)
            actions[name] = f"runs ({why})"

    preview(SOURCE, source_key_parts(state))
    for planned in plan.stages:
        missing = [name for name in planned.reads if name not in state.artifacts]
        if missing:  # the key of this stage is the hash of their digests too
            why = RERUN_REQUESTED if planned.name in plan.again else f"after {missing[0]}"
            actions[planned.name] = f"runs ({why})"
        else:
            preview(planned.name, stage_key_parts(state, planned))
    if loaded:
        state.load_data()
    return actions, state


def _judged(pipeline: PipelineConfig, options: RunOptions) -> PipelineConfig:
    """Return the pipeline with what the options say of how much is measured."""
    return pipeline.model_copy(update={"judge": options.judge}) if options.judge else pipeline


def _open_remote(url: str | None, announce: Callable[[str], None]) -> Remote | None:
    if url is None:
        return None
    # It imports fsspec, which only runs with a shared store need.
    from compress.pipelines.store.remote import Remote

    return Remote(url, announce)
