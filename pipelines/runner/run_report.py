"""Builds the report of a run, with warnings of what is suspicious although no gate refused it."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from compress.core.diagnosis.layer_diagnosis import RANGE_SAMPLES, UNLIKE, input_ranges, unlikeness
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.planning.plan import accuracy_drops
from compress.pipelines.results.schema import Report, measurement_warnings, rerun_command
from compress.pipelines.runner.evaluator import MeasurementCache
from compress.pipelines.runner.remembered import RememberedContents
from compress.pipelines.system.machine_info import machine, versions
from compress.pipelines.system.signals import INTERRUPTED, only_signals_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from compress.core.metrics import Metric
    from compress.core.metrics.score import Score
    from compress.data.splits import Splits
    from compress.pipelines.results.schema import Status
    from compress.pipelines.runner.run_state import RunState

log = logging.getLogger(__name__)


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
        accuracy_doubts=tuple(
            n
            for n in (SOURCE, *plan.names)
            if doubtful & {n, *(plan.branch(n) if n != SOURCE else ())}
        ),
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
    cache = MeasurementCache(state.entries[plan.baseline], state.artifacts[plan.baseline])
    constant = cache.get_or_measure(
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
    from compress.data.sample_cache import PROBES
    from compress.data.stream import FIRST_SAMPLES

    for name in sorted({"val", "test"} & contents.cached):
        yield (
            f"data.{name}: read through data.loader.cache; only {PROBES} samples are compared "
            "with the dataset"
        )
    cached = [
        planned.name
        for planned in state.plan.stages
        if planned.stage.uses_data
        and planned.name in state.reports
        and state.reports[planned.name].cached
    ]
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


def unlike_test(name: str, metric: str, on_val: Score, on_test: Score) -> str:
    """Describe how a metric on `test` differs from that on `val` beyond both intervals, or ''."""
    intervals = [score.uncertainty().interval for score in (on_val, on_test)]
    if None in intervals or max(i[0] for i in intervals) <= min(i[1] for i in intervals):  # type: ignore[index]
        return ""
    shown = (
        f"{score.value:.4f} on {split} ({score.uncertainty().in_words()})"
        for split, score in (("val", on_val), ("test", on_test))
    )
    return (
        f"{name}: {metric} is {' and '.join(shown)}, beyond what chance explains: test and val are "
        "not samples of the same data, or val was trained on"
    )


def unlike_val(data: Splits, samples: int, seed: int) -> str:
    """Describe how the range of calibration inputs differs from that of `val`; else return ''.

    `samples` and `seed` are those that the calibration samples were drawn with.
    """
    if "val" not in data.datasets:
        return ""
    calibrated = input_ranges(data.calibration(samples, seed))
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
    """Return the best metric on `val` of a constant output, as a baseline; None if there is none.

    For classes the output is their log-frequencies, for numbers the targets' mean or median.
    """
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
    if metric.loss.name == "binary_cross_entropy":
        targets = targets.float()  # also given as integers and booleans
    import torch

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
