"""Rows of the report: one for each stage with its status, and Pareto fronts over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import CASCADE, NOT_RUN
from compress.common.errors import CompressError
from compress.core.metrics import Metric, metric_class
from compress.core.verdict import explain
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.reporting.svg_plots import Plot, Point, pareto_indices, scatter_plot
from compress.pipelines.results.schema import (
    FIDELITY,
    FailureReport,
    SkippedReport,
    StageOutcome,
    StageReport,
)
from compress.pipelines.system.templates import readable_bytes
from compress.quantization.numeric_debug.fidelity_report import Fidelity, LabelParity

if TYPE_CHECKING:
    from compress.pipelines.results.measurements import Measurements
    from compress.pipelines.results.schema import Report

SHOWN_FIRST = 5  # most deployable artifacts named at the top of the page
NOT_FOR_DEPLOYMENT = ("eager", "graph", "torchserve", "triton", "kserve")
"""Kinds of artifacts that only Python runs, and packages of an artifact that is exported before."""


@dataclass(frozen=True, eq=False)
class StageRow:
    """A stage of a run, or the imported model."""

    number: int
    name: str
    stage: str
    input: str
    status: str
    """`passed`, `measured` (it has no gates), `refused`, `failed`, `interrupted`, `skipped`."""
    why: str = ""
    measured: Measurements | None = None
    report: StageReport | None = None

    @property
    def metric(self) -> float | None:
        """The value of the metric; None where it was not measured, or is not finite."""
        metric = self.measured.metric if self.measured else None
        return metric.value if metric and math.isfinite(metric.value) else None


@dataclass(frozen=True)
class ParetoFronts:
    """Plots of accuracy against size and against latency, and the rows on each Pareto front."""

    size: Plot
    time: Plot | None
    by_size: list[StageRow]
    """The front's members, the smallest first."""
    by_time: list[StageRow]
    """The front's members, the fastest first."""
    absent: list[StageRow]
    """Rows that are in no plot, as their metric was not measured."""
    untimed: list[StageRow]
    """Rows that are in the plot of sizes alone, as their time could not be measured."""

    def names_for(self, row: StageRow) -> str:
        """Return the fronts that a row is on, such as `size + time`; a dash for none."""
        names = [n for n, on in (("size", self.by_size), ("time", self.by_time)) if row in on]
        return " + ".join(names) or "–"


def build_rows(report: Report) -> list[StageRow]:
    """Build a row for each stage in pipeline order; the imported model is first if the baseline."""
    rows = []
    if report.baseline and report.baseline_name == SOURCE:
        rows.append(StageRow(0, SOURCE, SOURCE, "–", "measured", measured=report.baseline))
    settings: Any = report.lock.get("settings") or {}
    names = [stage.get("name") or stage.get("stage") for stage in settings.get("stages", ())]
    places = {name: place for place, name in enumerate([SOURCE, *names])}
    found: tuple[StageOutcome, ...] = (*report.stages, *report.failures, *report.skipped)
    in_order = sorted(found, key=lambda stage: places.get(stage.name, len(places)))
    for number, stage in enumerate(in_order, rows[-1].number + 1 if rows else 1):
        row = StageRow(number, stage.name, stage.stage, "", "skipped")
        if isinstance(stage, FailureReport):
            row = replace(row, status=stage.status, why=stage.error)
        elif isinstance(stage, SkippedReport):
            row = replace(row, why=f"skipped, as {stage.because} did not pass")
        elif isinstance(stage, StageReport):
            refused = [verdict for verdict in stage.verdicts if not verdict.passed]
            row = replace(
                row,
                input=stage.input,
                status="refused" if refused else "passed" if stage.verdicts else "measured",
                why="; ".join(map(explain, refused)),
                measured=stage.measurements,
                report=stage,
            )
        rows.append(row)
    return rows


def higher_is_better(report: Report) -> bool | None:
    """Whether a larger metric is better; None for a custom metric that does not declare it."""
    settings: Any = report.lock.get("settings") or {}
    spec = settings.get("metric") or {}
    arguments = tuple(sorted((spec.get("arguments") or {}).items()))
    try:
        return Metric(spec["name"], arguments, spec.get("higher_is_better")).higher_is_better
    except (CompressError, KeyError):
        return None


def pareto_fronts(report: Report, rows: Sequence[StageRow]) -> ParetoFronts | None:
    """Plot accuracy against size and latency; None with fewer than two measured metrics."""
    found = [row for row in rows if row.measured and row.metric is not None]
    if len(found) < 2:
        return None
    name = found[0].measured.metric.name  # type: ignore[union-attr]
    better = higher_is_better(report)
    timed = [row for row in found if row.measured and row.measured.speedup is not None]
    sizes, times = [], []
    for row in found:
        assert row.measured and row.metric is not None
        size, speedup = row.measured.bytes, row.measured.speedup
        title = f"{row.number} {row.name}: {row.metric:.4f}, "
        point = Point(
            label=str(row.number),
            title=f"{title}{readable_bytes(size)}",
            x=size,
            y=row.metric,
            refused=row.status == "refused",
            y_interval=_metric_interval(row, better),
        )
        sizes.append(point)
        if speedup is not None:
            # From interleaved calls: medians that were measured minutes apart would also differ by
            # the machine's changing clock and load.
            high, low = (1 / end for end in row.measured.speedup_interval or (speedup, speedup))
            title += f"{1 / speedup:.3g} of the baseline's time (95 %: {low:.3g} to {high:.3g})"
            times.append(replace(point, title=title, x=1 / speedup, x_interval=(low, high)))
    direction = {True: ", higher is better", False: ", lower is better", None: ""}[better]
    samples = found[0].measured.metric.samples  # type: ignore[union-attr]
    upwards, counted = f"{name} on val{direction}", f"n = {samples}" if samples else ""
    smallest, fastest = (
        set() if better is None else pareto_indices(points, better) for points in (sizes, times)
    )

    def plot(points: list[Point], front: set[int], what: str, x_name: str, shown: Any) -> Plot:
        title, names = f"{name} against {what}", (x_name, upwards)
        return scatter_plot(points, front, title=title, names=names, shown=shown, counted=counted)

    relative = f"time of a call, {report.baseline_name} = 1"
    return ParetoFronts(
        size=plot(sizes, smallest, "size", "size of the file", _size_on_axis),
        time=plot(times, fastest, "latency", relative, "{:g}".format) if times else None,
        by_size=[found[i] for i in sorted(smallest, key=lambda i: sizes[i].x)],
        by_time=[timed[i] for i in sorted(fastest, key=lambda i: times[i].x)],
        absent=[row for row in rows if row not in found],
        untimed=[row for row in found if row not in timed],
    )


def _size_on_axis(size: float) -> str:
    return f"{size / 1e6:g} MB" if size >= 1e6 else f"{size / 1e3:g} kB"


def _metric_interval(row: StageRow, higher_is_better: bool | None) -> tuple[float, float] | None:
    """Return the ends of a metric's interval: those of its difference to the baseline's."""
    metric = row.measured.metric if row.measured else None
    drop = metric.drop if metric else None
    if drop is None or drop.uncertainty.interval is None or higher_is_better is None:
        return None
    assert metric is not None
    # Drops are in points, hundredths of the metric, and positive where it gets worse.
    sign = 0.01 if higher_is_better else -0.01
    ends = (metric.value + sign * (drop.points - end) for end in drop.uncertainty.interval)
    if metric_class(metric.name).is_fraction:
        ends = (min(max(end, 0.0), 1.0) for end in ends)
    low, high = sorted(ends)
    return low, high


def deployable_rows(
    rows: Sequence[StageRow], fronts: ParetoFronts | None, report: Report
) -> list[StageRow]:
    """Return artifacts on a front, and passed ones that none reads; none of doubtful accuracy."""
    passed = [row for row in rows if row.report and row.status in ("passed", "measured")]
    left_out = (report.baseline_name, *report.accuracy_doubts)
    made = [row for row in passed if row.name not in left_out]
    read = {row.input for row in made}
    on_front = [*fronts.by_size, *fronts.by_time] if fronts else []
    leaves = [row for row in made if row.name not in read]
    return [row for row in dict.fromkeys((*on_front, *leaves)) if row in made]


def failure_reasons(rows: Sequence[StageRow]) -> list[tuple[str, str]]:
    """Return stage names and why they were refused, failed or skipped (one entry per reason)."""
    reasons = [
        (row.name, row.why.removeprefix(f"{row.name}: "))
        for row in rows
        if row.status in ("refused", "failed")
    ]
    skipped: dict[str, list[str]] = {}
    for row in rows:
        if row.status == "skipped":
            skipped.setdefault(row.why, []).append(row.name)
    return [*reasons, *((", ".join(names), why) for why, names in skipped.items())]


def count_by_status(rows: Sequence[StageRow]) -> str:
    """Return the number of stages by status, as in `5 stages: 4 passed their gates, 1 failed`."""
    statuses = [row.status for row in rows if row.stage != SOURCE]
    words = {"passed": "passed their gates", "measured": "had no gates"}
    order = ("passed", "measured", "refused", "failed", "interrupted", "skipped")
    parts = [f"{statuses.count(s)} {words.get(s, s)}" for s in order if s in statuses]
    return f"{len(statuses)} stages: {', '.join(parts)}" if parts else "no stage was reached"


def fidelity_of(stage: StageReport) -> Fidelity | None:
    """Return a stage's comparison with its float model; None where it has none."""
    found = stage.artifact.facts.get(FIDELITY)
    return None if found is None else Fidelity.model_validate(found)


def sameness_of(stage: StageReport) -> LabelParity | None:
    """Return how many labels of an int8 export equal those of its QAT model; None without QAT."""
    found = stage.artifact.facts.get("same_as_trained")
    return None if found is None else LabelParity.model_validate(found)


@dataclass(frozen=True)
class Headline:
    """What the recommended artifact gained against the baseline."""

    gains: str
    """Such as `4.36 MB → 286 kB, 2.7× faster by compression (12.7× against eager PyTorch: 4.7× by
    ONNX Runtime), accuracy 0.9944 → 0.9917`."""
    artifact: str
    """Its folder, relative to that of the results."""
    file: str
    is_served: bool
    """Whether `compress serve` takes it."""


def headline(report: Report) -> Headline | None:
    """Return what to deploy of a passed run: its fastest exported artifact, else its smallest.

    None where a stage did not pass, nothing was exported, there is no baseline to compare with, or
    all files are slower than the uncompressed model in their runtime, were not run here, have a
    warning about their accuracy, or an output that moved and that nothing reads. The two models of
    a cascade are its parts: one is faster, and labels more inputs otherwise than the cascade may.
    """
    parts = set[str]()
    for stage in report.stages:
        found: Any = stage.artifact.facts.get(CASCADE)
        parts |= {stage.input, found.get("fallback", "")} if found else set()
    unsure = {stage.name for stage in report.stages if stage.unread_outputs}
    exported = [
        (stage.measurements, stage.artifact)
        for stage in report.stages
        if stage.name not in (report.baseline_name, *report.accuracy_doubts, *parts)
        and stage.artifact.kind not in NOT_FOR_DEPLOYMENT
        and NOT_RUN not in stage.artifact.facts
        # Who exports the uncompressed model to the same runtime has the faster file.
        and not (stage.measurements.same_runtime and stage.measurements.same_runtime.is_slower)
        and unsure.isdisjoint((*stage.branch, stage.name))
    ]
    if report.status != "passed" or report.baseline is None or not exported:
        return None
    before = report.baseline
    after, artifact = min(exported, key=lambda e: (-(e[0].speedup or 0), e[0].bytes))
    gains = [f"{readable_bytes(before.bytes)} → {readable_bytes(after.bytes)}"]
    if speed := speed_in_words(after, before):
        gains.append(speed)
    if before.metric and after.metric:
        name, drop = after.metric.name, after.metric.drop
        change = f" ({drop.in_words(name)})" if drop else ""
        gains.append(f"{name} {before.metric.value:.4f} → {after.metric.value:.4f}{change}")
    elif after.metric:
        gains.append(f"{after.metric.name} {after.metric.value:.4f}")
    if report.judged == "quick":
        gains.append("judged quickly")
    fastest: Any = artifact.facts.get("fastest")  # of export_fastest
    if fastest:
        gains.append(fastest["verdict"])
    from compress.serve.http.loaded_model import SERVED_KINDS  # imports every exporter

    is_served = artifact.kind in (*SERVED_KINDS, "genai")
    return Headline(", ".join(gains), artifact.path, artifact.file, is_served)


def speed_in_words(after: Measurements, before: Measurements) -> str:
    """Return what compression gained in speed, and what the runtime did; empty if unmeasurable."""
    total, own, origin = after.speedup, after.same_runtime, before.same_runtime
    if own is None or own.speedup is None:
        return _factor(total) if total is not None else ""
    gained = (
        f"{_factor(own.speedup)} by compression"
        if own.is_faster or own.is_slower
        else f"as fast as before in {own.runtime}"
    )
    if total is None or origin is None or origin.runtime == own.runtime:
        return gained
    by_runtime = f"{total / own.speedup:.1f}× by {own.runtime}"
    return f"{gained} ({total:.1f}× against {origin.runtime}: {by_runtime})"


def _factor(speedup: float) -> str:
    return f"{1 / speedup:.1f}× slower" if speedup < 1 else f"{speedup:.1f}× faster"
