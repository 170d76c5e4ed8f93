"""Runs a pipeline and builds its report, or predicts what a run would do."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, GateRefused
from compress.common.process import import_modules, torch_threads, within_quota
from compress.core.diagnosis.layer_diagnosis import RANGE_SAMPLES, UNLIKE, input_ranges, unlikeness
from compress.core.stage import members_of
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.executors.engines import check_engine, engine_for
from compress.pipelines.executors.launched import check_processes, write_run_id
from compress.pipelines.planning.plan import accuracy_drops, advice
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.results.schema import (
    Report,
    measurement_warnings,
    remove_report,
    rerun_command,
)
from compress.pipelines.runner.cache_keys import source_key_parts, stage_key_parts
from compress.pipelines.runner.evaluator import ArtifactEvaluator
from compress.pipelines.runner.executor import RERUN_REQUESTED, PipelineExecutor, schedule
from compress.pipelines.runner.inputs import (
    INPUTS_FILE,
    RememberedContents,
    RememberedSplits,
    load_inputs,
    variables_noted,
)
from compress.pipelines.runner.run_state import RunState
from compress.pipelines.runner.source_model import import_model_code
from compress.pipelines.store.local import Store, note_samples
from compress.pipelines.system import jsonl_log, signals
from compress.pipelines.system.error_context import readable_disk_errors
from compress.pipelines.system.machine_info import machine, versions
from compress.pipelines.system.run_profile import Profiler
from compress.pipelines.system.signals import INTERRUPTED, only_signals_interrupt
from compress.pipelines.system.temp_files import temporary_files
from compress.profiling.peak_memory import fork_worker, measurement_process

if TYPE_CHECKING:
    import torch

    from compress.core.metrics import Metric
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.results.schema import Status
    from compress.pipelines.runner.inputs import Inputs

log = logging.getLogger(__name__)

DEFAULTS = RunOptions()
COUNTED_WITH = ("torch._dynamo",)  # what torch imports when multiply-accumulates are counted


def run(
    pipeline: PipelineConfig, out: Path, options: RunOptions, render: Callable[[Report, Path], str]
) -> Report:
    """Run a pipeline and write its report; return it where all gates passed.

    `render` makes the text of `report.html` from the report and `out`. Raises as `Pipeline.run`;
    where several stages did not pass, the errors of the others are the notes of the first.
    """
    check_engine(pipeline, options.engine)
    profiler = Profiler(is_on=options.profile)
    inputs, state = _open(pipeline, out, options)
    pipeline, plan, store, state.profiler = state.pipeline, state.plan, state.store, profiler
    if inputs.inferred:
        options.announce(inputs.inferred)
    with (
        readable_disk_errors(out),
        temporary_files(),
        within_quota(),
        measurement_process(),
        store.locked(),
        ExitStack() as log_handlers,
    ):
        write_run_id(store.root)
        # Refused before the last report is removed.
        check_processes(pipeline, store.root)
        remove_report(out)
        data: Any = inputs.data
        if isinstance(data, RememberedSplits):
            state.data_warnings = data.facts.warnings
        if options.measured == "last":
            state.unmeasured = frozenset(plan.names[:-1])
        elif options.measured == "none":
            state.unmeasured = frozenset((SOURCE, *plan.names))
        elif state.is_quick:
            state.unmeasured = frozenset((SOURCE, *plan.names)) - {*plan.leaves}
        if state.contents:
            note_samples(store.root, state.contents)
            inputs.keep(state.contents, state.data_warnings, store.surroundings)
        run_id = uuid.uuid4().hex[:12]
        file = jsonl_log.LogFile(out / jsonl_log.LOG, run_id, lambda: state.outcome.current)
        log_handlers.enter_context(jsonl_log.log_handler(file))
        if pipeline.tracker is not None:
            # It imports torch, which a run of cached results does not need.
            from compress.pipelines.runner.trackers import TrackerHandler

            tracker = TrackerHandler(pipeline.tracker, out, f"{pipeline.name}-{run_id}", run_id)
            log_handlers.enter_context(jsonl_log.log_handler(tracker))
        return _execute(state, options, render)


def _open(pipeline: PipelineConfig, out: Path, options: RunOptions) -> tuple[Inputs, RunState]:
    """Plan a run, load its data or what is known of them, and open its store."""
    remote, root, announce = None, options.cache or out / ".store", options.announce
    if options.store is not None:
        # It imports fsspec, which only runs with a shared store need.
        from compress.pipelines.store.remote import Remote

        remote = Remote(options.store, announce)
    plan = build_plan(pipeline, options.start, options.until, force=options.force)
    for warning in plan.warnings:
        announce(f"warning: {warning}")
    folder, code = pipeline.folder, pipeline.code_folder
    store = Store(root, remote, folder=folder, code=code, announce=announce)
    inputs = load_inputs(pipeline, plan, root / INPUTS_FILE, store.surroundings)
    pipeline = inputs.pipeline
    if options.judge:
        pipeline = pipeline.model_copy(update={"judge": options.judge})
    emit = jsonl_log.EventEmitter(announce)
    return inputs, RunState(pipeline, inputs.plan, out, store, inputs.data, options.progress, emit)


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
            # Threads that an import lets torch begin would be missing in the fork, which waits for
            # them.
            with torch_threads(1):
                import_model_code(pipeline)
        # Else nothing may have to be measured, and then nothing needs torch.
        if not (store / INPUTS_FILE).exists():
            stack.enter_context(measurement_process())
            fork_worker()
        yield


def _execute(state: RunState, options: RunOptions, render: Callable[[Report, Path], str]) -> Report:
    """Execute all stages, and write the report however the run ends."""
    began, pipeline = time.monotonic(), state.pipeline
    fields = {
        "pipeline": pipeline.name,
        "command": rerun_command(pipeline.file, state.out, pipeline.judge),
        "versions": dict(versions()),
        "machine": dict(machine()),
        "settings": pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    line = f"{pipeline.name}: started"
    state.emit("run_started", None, line, fields, is_announced=False)
    if state.plan.task_line:
        state.emit("task_known", None, state.plan.task_line)
    for warning in state.plan.warnings:  # announced before the log was there
        jsonl_log.log_event("message", warning, level="warning")
    for warning in state.data_warnings:
        state.emit("message", None, f"warning: {warning}", level="warning")
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
            failures = state.outcome.failures
            running = [name for name, f in failures.items() if f.status == INTERRUPTED]
            message = f"{INTERRUPTED} at {', '.join(running)}" if running else INTERRUPTED
            error.add_note(message)  # which the command line shows
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
    for warning in report.warnings:
        if warning not in state.data_warnings:  # those were logged at the start
            jsonl_log.log_event("message", warning, level="warning")
    fields = {
        "status": report.status,
        "error": report.error,
        "seconds": seconds,
        "test": report.test.values if report.test else {},
    }
    level = "info" if report.status == "passed" else "error"
    line = f"{report.pipeline}: {report.status}"
    state.emit("run_finished", None, line, fields, level, is_announced=False)


def preview_run(
    pipeline: PipelineConfig, out: Path, options: RunOptions = DEFAULTS
) -> dict[str, str]:
    """Return for each stage `cached`, or why it would run; nothing is run."""
    return preview_state(pipeline, out, options, loaded=False)[0]


def preview_state(
    pipeline: PipelineConfig, out: Path, options: RunOptions = DEFAULTS, *, loaded: bool = True
) -> tuple[dict[str, str], RunState]:
    """Return what :func:`preview_run` does, and the state of a run that holds what is cached."""
    _, state = _open(pipeline, out, options)
    plan, store = state.plan, state.store
    store.refuse_another_format()
    if store._remote:
        store._remote.refuse_another_format()
    actions: dict[str, str] = {}

    def preview(name: str, parts: dict[str, Any]) -> None:
        entry, rerun = store.entry(parts), name in plan.again
        found = None if rerun else store.get(entry, downloads=False)
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


def build_report(state: RunState, status: Status, error: str = "") -> Report:
    """Build the report of what a run has produced until it ended, with the error that ended it."""
    plan, outcome, pipeline = state.plan, state.outcome, state.pipeline
    stages = tuple(state.reports[name] for name in plan.ordered(state.reports))
    failures = tuple(outcome.failures[name] for name in plan.ordered(outcome.failures))
    doubts: dict[str, tuple[str, ...]] = {}
    # They may read data and score: who interrupts a run does not wait for that.
    if status != INTERRUPTED:
        try:
            with only_signals_interrupt():
                doubts.update(_accuracy_warnings(state))
        except Exception:  # the report is written all the same, with the warnings so far
            log.debug("accuracies could not be checked", exc_info=True)
    doubts |= state.test.unlike_val if state.test else {}
    doubtful = {name for names in doubts.values() for name in names}
    return Report(
        pipeline=pipeline.name,
        status=status,
        error=error,
        date=datetime.now(UTC).isoformat(" ", "minutes"),
        failed_stage=failures[0] if failures else None,
        failures=failures,
        skipped=tuple(outcome.skipped[name] for name in plan.ordered(outcome.skipped)),
        baseline_name=plan.baseline,
        baseline=state.baseline,
        baseline_answered_by=state.baseline_answered_by,
        stages=stages,
        warnings=(
            *state.data_warnings,
            *dict.fromkeys(
                kept.line()
                for n in plan.ordered(state.artifacts)
                if (kept := state.artifacts[n].signature.state)
            ),
            *doubts,
            *measurement_warnings(stages, plan.baseline, state.baseline),
            *_sampling_warnings(state),
            *state.store.warnings,
        ),
        accuracy_doubts=tuple(n for n in (SOURCE, *plan.names) if doubtful & {n, *plan.branch(n)}),
        test=state.test,
        judged=pipeline.judge,
        profile=state.profiler.profile(),
        lock={
            "source": state.store.last_parts(SOURCE),
            "file": pipeline.file,
            "command": rerun_command(pipeline.file, state.out, pipeline.judge),
            "versions": dict(versions()),
            "machine": dict(machine()),
            "seed": pipeline.seed,
            "data": state.fingerprint,
            "task": plan.loss.task.name if plan.loss.task else None,
            "artifacts": {n: state.artifacts[n].digest for n in plan.ordered(state.artifacts)},
            "settings": pipeline.model_dump(mode="json", by_alias=True),
        },
    )


def _accuracy_warnings(state: RunState) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a warning for each suspicious accuracy, with its likely cause, and its stages."""
    plan, metric, data = state.plan, state.plan.metric, state.data
    measurements = {name: report.measurements for name, report in state.reports.items()}
    if state.baseline:
        measurements = {plan.baseline: state.baseline} | measurements
    measured = {name: m.metric.value for name, m in measurements.items() if m.metric}
    values = {name: value for name, value in measured.items() if math.isfinite(value)}
    if not metric.is_measured:  # not even a figure shows what compression cost
        yield from ((line, ()) for line in advice(plan))
    if plan.baseline not in values:
        return
    for drop in accuracy_drops(plan, metric, values):
        stage: Any = plan.stage(drop.stage).stage
        cause = ""
        if stage.needs_data and stage.drawn_samples and data is not None:
            cause = unlike_val(data, stage.available_samples(data), state.pipeline.seed)
        if cause or not drop.is_judged:
            yield drop.line(metric, cause), (drop.stage,)
    if data is None:
        return
    key = {"constant answer": 1, "data": state.fingerprint, "metric": metric.identity()}
    constant = ArtifactEvaluator(state, plan.baseline).get_or_measure(
        key,
        measure=lambda: constant_score(data, metric),
        load=lambda stored: stored if isinstance(stored, int | float) else None,
        dump=lambda score: "none" if score is None else score,
    )
    if constant is None:
        return
    no_better = [
        name
        for name in (SOURCE, *plan.names)
        # Rounded, as 1e-17 is no improvement either.
        if name in values and round(metric.drop_points(constant, values[name]), 9) >= 0
    ]
    if no_better:
        yield (
            f"{', '.join(no_better)}: {metric.name} is no better than that of one and the same "
            f"answer to every sample ({constant:.4f} on val); train longer, or judge by another "
            "metric",
            tuple(no_better),
        )


def _sampling_warnings(state: RunState) -> Iterator[str]:
    """Yield which splits were hashed in part only, where that could hide a change of the data."""
    contents: Any = state.contents
    if contents is None or isinstance(contents, RememberedContents):
        return  # every sample was hashed
    from compress.data.dataloader import FIRST_SAMPLES
    from compress.data.sample_cache import PROBES

    for name in sorted({"val", "test"} & contents.cached):
        yield (
            f"data.{name}: read through data.loader.cache; only {PROBES} samples are compared "
            "with the dataset"
        )
    from_cache = {name for name, report in state.reports.items() if report.cached}
    cached = [p.name for p in state.plan.stages if p.stage.uses_data and p.name in from_cache]
    if not cached:
        return
    for name, fingerprint in contents.streams.items():
        if fingerprint is None and contents.counts[name] == FIRST_SAMPLES:
            yield (
                f"data.{name}: a stream (the first {FIRST_SAMPLES} samples hashed); a change of "
                "the others, or of their order, would not be seen in what is cached "
                f"({', '.join(cached)}); give the dataset an attribute fingerprint, a text that "
                "changes with its content"
            )
    for name in sorted({*contents.sampled} - contents.unrepeatable):
        counts = f"{contents.counts[name]} of {contents.lengths[name]} samples"
        yield (
            f"data.{name}: sampled ({counts} hashed); a change of the others would not be seen "
            f"in what is cached ({', '.join(cached)})"
        )


def unlike_val(data: Splits, samples: int, seed: int) -> str:
    """Describe how the range of calibration inputs differs from that of `val`; else return ''."""
    if "val" not in data.datasets:
        return ""
    drawn = data.calibration(samples, seed)
    calibrated = input_ranges(part for batch in drawn for part in data.divided(batch))
    evaluated = input_ranges(data.batches("val", limit=RANGE_SAMPLES))
    if unlikeness(calibrated, evaluated) <= UNLIKE:
        return ""
    own, val = max(
        ((a, b) for a, b in zip(calibrated, evaluated, strict=True) if a and b),
        key=lambda pair: unlikeness(pair[:1], pair[1:]),
    )
    return (
        f"calibration inputs are {own.mean:.4g} ± {own.deviation:.4g} (mean and standard "
        f"deviation), val {val.mean:.4g} ± {val.deviation:.4g}: scale the samples of "
        f"{data.calibration_split} as those of val"
    )


def constant_score(data: Splits, metric: Metric) -> float | None:
    """Return the best metric on `val` of a constant output, as a baseline; None without any."""
    if metric.needs_reference:
        return None
    import torch

    # All targets, unlike outputs, are kept: the median needs them.
    batches = [b.target for b in data.batches("val") if b.target is not None]
    targets = [target for target in batches if isinstance(target, torch.Tensor)]
    if not targets or len(targets) < len(batches):
        return None
    try:
        metric = metric.with_inferred_loss(data)
        scores = []
        for row in _constant_outputs(torch.cat(targets), metric):
            meter = metric.meter()
            for batch in targets:
                meter.update(row.expand(len(batch), *row.shape[1:]), batch)
            scores.append(meter.compute())
    except Exception:  # noqa: BLE001 - a metric may want outputs of another form
        return None
    return max(scores) if metric.higher_is_better else min(scores)


def _constant_outputs(targets: torch.Tensor, metric: Metric) -> Iterator[torch.Tensor]:
    """Yield a sample's constant outputs, `(1, …)`; one scores best under each kind of metric."""
    import torch

    if metric.loss.name == "binary_cross_entropy":
        targets = targets.float()  # also given as integers and booleans
    if not targets.is_floating_point():
        counts = torch.bincount(targets[targets >= 0].flatten().long(), minlength=2)
        # A class without a sample would have the logarithm of 0.
        scores = (counts / counts.sum()).clamp(min=1e-6).log()
        shape = (1, len(scores), *(1 for _ in targets.shape[1:]))
        yield scores.view(shape).expand(1, -1, *targets.shape[1:])
        return
    mean = targets.mean(0, keepdim=True)
    is_binary = bool(((targets == 0) | (targets == 1)).all())
    if is_binary and not (metric.loss.is_regression or metric.of_numbers):
        yield mean.logit(1e-6)  # models with binary targets output logits
        return
    yield mean
    yield targets.quantile(0.5, dim=0, keepdim=True)  # the best for mae
