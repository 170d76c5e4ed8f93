"""What the page says of each stage of a run: made, refused, failed or never reached."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from compress.common.errors import CompressError
from compress.core.metrics import Metric
from pipelines.config.model_spec import SOURCE
from pipelines.reporting.svg_plots import Plot, Point, pareto, scatter
from pipelines.results.schema import readable_bytes
from pipelines.results.stage_reports import FailureReport, SkippedReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipelines.results.measurements import Measurements
    from pipelines.results.schema import Report
    from pipelines.results.stage_reports import StageReport

Ended: TypeAlias = "StageReport | FailureReport | SkippedReport"
SHOWN_FIRST = 5
"""Artifacts that are named at the top of the page."""


@dataclass(frozen=True, eq=False)
class Row:
    """A stage of a run, or the model as it came in."""

    number: int
    name: str
    stage: str
    input: str
    status: str
    """`passed`, `measured` (no gate judged it), `refused`, `failed`, `interrupted`, `skipped`."""
    why: str = ""
    """Why it was refused, failed or skipped."""
    measured: Measurements | None = None
    report: StageReport | None = None

    @property
    def metric(self) -> float | None:
        """The value of the metric; None where it was not measured, or is not finite."""
        metric = self.measured.metric if self.measured else None
        return metric.value if metric and math.isfinite(metric.value) else None


@dataclass(frozen=True)
class Fronts:
    """Accuracy against size and against time, and the rows that no other beats."""

    size: Plot
    time: Plot | None
    """None where no time could be measured."""
    by_size: list[Row]
    """The front's members, the smallest first."""
    by_time: list[Row]
    """The front's members, the fastest first."""
    absent: list[Row]
    """Rows that are in no plot, as their metric was not measured."""
    untimed: list[Row]
    """Rows that are in the plot of sizes alone, as their time could not be measured."""

    def of(self, row: Row) -> str:
        """Return on which fronts a row is, in words; a dash where on none."""
        names = [n for n, on in (("size", self.by_size), ("time", self.by_time)) if row in on]
        return " + ".join(names) or "–"


def rows_of(report: Report) -> list[Row]:
    """Return a row for each stage of a run that came to an end, in the pipeline's order.

    Before them comes the model as it came in, where that is the baseline.
    """
    rows = []
    if report.baseline and report.baseline_name == SOURCE:
        rows.append(Row(0, SOURCE, SOURCE, "–", "measured", measured=report.baseline))
    for number, stage in enumerate(in_order(report), rows[-1].number + 1 if rows else 1):
        rows.append(_row(number, stage))
    return rows


def in_order(report: Report) -> list[Ended]:
    """Return what came of each stage, in the pipeline's order; what the lock does not name last."""
    settings: Any = report.lock.get("settings") or {}
    names = [stage.get("name") or stage.get("stage") for stage in settings.get("stages", ())]
    places = {name: place for place, name in enumerate([SOURCE, *names])}
    found: tuple[Ended, ...] = (*report.stages, *report.failures, *report.skipped)
    return sorted(found, key=lambda stage: places.get(stage.name, len(places)))


def _row(number: int, stage: Ended) -> Row:
    from compress.core.verdict import explain

    if isinstance(stage, FailureReport):
        return Row(number, stage.name, stage.stage, "", stage.status, stage.error)
    if isinstance(stage, SkippedReport):
        why = f"skipped, as {stage.because} did not pass"
        return Row(number, stage.name, stage.stage, "", "skipped", why)
    refused = [verdict for verdict in stage.verdicts if not verdict.passed]
    status = "refused" if refused else "passed" if stage.verdicts else "measured"
    why = "; ".join(map(explain, refused))
    measured = stage.measurements
    return Row(number, stage.name, stage.stage, stage.input, status, why, measured, stage)


def higher_is_better(report: Report) -> bool | None:
    """Return whether a larger metric is the better one; None where nobody tells."""
    settings: Any = report.lock.get("settings") or {}
    spec = settings.get("metric") or {}
    arguments = tuple(sorted((spec.get("arguments") or {}).items()))
    try:
        return Metric(spec["name"], arguments, spec.get("higher_is_better")).higher_is_better
    except (CompressError, KeyError):
        return None


def fronts_of(report: Report, rows: Sequence[Row]) -> Fronts | None:
    """Return the plots of accuracy against size and time; None without two rows to compare."""
    found = [row for row in rows if row.measured and row.metric is not None]
    if len(found) < 2:
        return None
    name = found[0].measured.metric.name  # type: ignore[union-attr]
    better = higher_is_better(report)
    timed = [row for row in found if row.measured and row.measured.speedup is not None]
    sizes, times = [_by_size(row) for row in found], [_by_time(row) for row in timed]
    direction = {True: ", higher is better", False: ", lower is better", None: ""}[better]
    smallest = set() if better is None else pareto(sizes, better)
    fastest = set() if better is None else pareto(times, better)
    upwards = f"{name} on val{direction}"
    relative = f"time of a call, {report.baseline_name} = 1"
    return Fronts(
        size=scatter(
            sizes,
            smallest,
            title=f"{name} against size",
            names=("size of the file", upwards),
            shown=_short_bytes,
        ),
        time=scatter(
            times,
            fastest,
            title=f"{name} against latency",
            names=(relative, upwards),
            shown=lambda v: f"{v:g}",
        )
        if times
        else None,
        by_size=[found[i] for i in sorted(smallest, key=lambda i: sizes[i].x)],
        by_time=[timed[i] for i in sorted(fastest, key=lambda i: times[i].x)],
        absent=[row for row in rows if row not in found],
        untimed=[row for row in found if row not in timed],
    )


def _by_size(row: Row) -> Point:
    assert row.measured and row.metric is not None
    size = row.measured.bytes
    title = f"{row.number} {row.name}: {row.metric:.4f}, {readable_bytes(size)}"
    return Point(str(row.number), title, size, row.metric, refused=row.status == "refused")


def _short_bytes(value: float) -> str:
    return f"{value / 1e6:g} MB" if value >= 1e6 else readable_bytes(round(value))


def _by_time(row: Row) -> Point:
    """Return a row by its time as a share of the baseline's, both measured in turn.

    Medians of two stages are of different moments, and a machine is not equally fast in them.
    """
    assert row.measured and row.metric is not None and row.measured.speedup
    ratio = row.measured.speedup
    share = 1 / ratio
    high, low = (1 / end for end in row.measured.speedup_interval or (ratio, ratio))
    title = (
        f"{row.number} {row.name}: {row.metric:.4f}, {share:.3g} of the baseline's time "
        f"(95 %: {low:.3g} to {high:.3g})"
    )
    refused = row.status == "refused"
    return Point(str(row.number), title, share, row.metric, (low, high), refused)


def shipped(rows: Sequence[Row], fronts: Fronts | None, baseline: str) -> list[Row]:
    """Return what can be deployed: the fronts' members, then what passed and no other reads.

    Args:
        rows: the stages.
        fronts: accuracy against size and time, where they were measured.
        baseline: name of what all is compared with; it is no choice of its own.
    """
    passed = [row for row in rows if row.report and row.status in ("passed", "measured")]
    made = [row for row in passed if row.name != baseline]
    read = {row.input for row in made}
    on_front = [*fronts.by_size, *fronts.by_time] if fronts else []
    leaves = [row for row in made if row.name not in read]
    return [row for row in dict.fromkeys((*on_front, *leaves)) if row in made]


def hindrances(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what did not pass: a stage or several, and why."""
    told = [
        (row.name, row.why.removeprefix(f"{row.name}: "))
        for row in rows
        if row.status in ("refused", "failed")
    ]
    skipped: dict[str, list[str]] = {}
    for row in rows:
        if row.status == "skipped":
            skipped.setdefault(row.why, []).append(row.name)
    return [*told, *((", ".join(names), why) for why, names in skipped.items())]


def counted(rows: Sequence[Row]) -> str:
    """Return how many stages passed, were refused and so on, in words."""
    statuses = [row.status for row in rows if row.stage != SOURCE]
    words = {
        "passed": "passed their gates",
        "measured": "had no gates",
        "refused": "refused",
        "failed": "failed",
        "interrupted": "interrupted",
        "skipped": "skipped",
    }
    told = [f"{statuses.count(s)} {words[s]}" for s in words if s in statuses]
    return f"{len(statuses)} stages: {', '.join(told)}" if told else "no stage was reached"
