"""The report as a table for a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from compress.common.printable import printable
from compress.core.gates import rule_in_words, value_in_words
from compress.core.gates.runtime import EAGER
from compress.pipelines.reporting import stage_rows
from compress.pipelines.results.comparison import Differences, row_of
from compress.pipelines.system.rich_output import PlainConsole
from compress.pipelines.system.templates import readable_bytes, readable_count

if TYPE_CHECKING:
    from rich.console import Console

    from compress.pipelines.results.measurements import Measurements, SpeedupReport
    from compress.pipelines.results.schema import Report

VS_EAGER = "vs eager"  # speedup over the baseline as it is, and not in the artifact's own runtime
COLUMNS = {
    "metric": 0,
    "drop (95 %)": 7,
    "size": 0,
    "smaller": 0,
    "params": 4,
    "MACs": 3,
    "p50 ms": 5,
    "p95 ms": 2,
    "faster": 0,
    VS_EAGER: 8,
    "peak MiB": 6,
    "gates": 0,
    "run + evaluation": 1,
}
"""Column → when a narrow terminal drops it: 1 first, 0 never."""
OPTIONAL_COLUMNS = sorted((c for c in COLUMNS if COLUMNS[c]), key=COLUMNS.__getitem__)
QUICK = (
    "judged quickly: the metric and a short latency of what is shipped alone, exports compared on "
    "16 samples; run without --quick for a full judgement"
)
NOT_MEASURABLE = "n/m"  # timings on a busy machine were too noisy; a warning says so


def wide_console() -> Console:
    """Return the console that tables are printed on: 160 columns where there is no terminal."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=160)


def stage_table(report: Report, console: Console) -> Table:
    """Build a table with one row per stage and as many columns as fit the console.

    Ratios are against the baseline, `faster` in the artifact's own runtime; latency at batch 1.
    """
    for left_out in range(len(OPTIONAL_COLUMNS) + 1):
        shown = [c for c in COLUMNS if c not in OPTIONAL_COLUMNS[:left_out]]
        table = _table(report, shown)
        # Without a limit: to fit the console, rich would fold the columns.
        unlimited = console.options.update(width=1000)
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            return table
    return _table(report, shown, tight=True)


def gate_lines(report: Report) -> Iterator[Text]:
    """Yield one line per verdict, and one for each stage that failed or was skipped."""
    metric = _metric(report)
    for stage in report.stages:
        for v in stage.verdicts:
            mark, style = ("✓", "green") if v.passed else ("✗", "bold red")
            rule = rule_in_words(v, metric) + v.compared
            yield Text(f"{mark} {stage.name}: {rule}: {value_in_words(v, metric)}", style=style)
    for skipped in report.skipped:
        yield Text(f"– {skipped.name}: skipped, as {skipped.because} did not pass")
    for failed in report.failures:
        yield Text(f"✗ {failed.error}", style="bold red")


def closing_lines(report: Report, out: Path) -> Iterator[Text]:
    """Yield the lines below the table, what to deploy last."""
    if report.judged == "quick":
        yield Text(QUICK, style="bold yellow")
    answered_by = {stage.name: stage.answered_by for stage in report.stages}
    for name, form in ({report.baseline_name: report.baseline_answered_by} | answered_by).items():
        if form:
            yield Text(f"{name}: metric and outputs were measured on {form}")
    for stage in report.stages:
        if fidelity := stage_rows.fidelity_of(stage):
            yield Text(f"{stage.name}: {fidelity.line()}")
        if sameness := stage_rows.sameness_of(stage):
            yield Text(f"{stage.name}: {sameness.line()}")
        for device in stage.devices:
            yield Text(f"{stage.name} {device.line(report.baseline_name)}")
    yield from gate_lines(report)
    if report.test:
        values = ", ".join(f"{name} {value:.4f}" for name, value in report.test.values.items())
        counted = f" ({report.test.samples} samples)" if report.test.samples else ""
        yield Text(f"test {report.test.metric}{counted}: {values}")
    for warning in report.warnings:
        yield Text(f"! {warning}", style="bold yellow")
    for line in report.profile.lines() if report.profile else ():
        yield Text(f"profile: {line}")
    cached = sum(stage.cached for stage in report.stages)
    counted = f"{cached} of {len(report.stages)} stages cached; "
    yield Text(f"{'' if report.failed_stage else counted}report: {out / 'report.html'}")
    if found := stage_rows.headline(report):
        folder = out / found.artifact
        yield Text(f"{found.gains}: deploy {folder / found.file}", style="bold green")
        if found.is_served:
            yield Text(f"serve it: compress serve {shlex.quote(str(folder))}")
    elif report.status == "passed" and report.accuracy_doubts:
        doubts = ", ".join(report.accuracy_doubts)
        yield Text(f"nothing to deploy: a warning is about the accuracy of {doubts}", "bold yellow")


def difference_table(differences: Differences) -> Table:
    """Return one row for each thing that differs between two runs."""
    title = printable(f"{differences.before} → {differences.after}")
    table = Table(title_justify="left", title=title)
    for column in ("what", "before", "after"):
        table.add_column(column, overflow="fold")
    for part in (differences.asked, differences.surroundings, differences.found):
        for difference in part:
            table.add_row(*row_of(difference))
        table.add_section()
    return table


def difference_lines(differences: Differences) -> Iterator[Text]:
    """Yield the lines below the table of differences."""
    if not (differences.asked or differences.surroundings):
        is_run = Path(differences.before).is_dir()
        what = "settings, data, versions and machine" if is_run else "files and data"
        yield Text(f"the same {what}")
    if not differences.found:
        yield Text("the same results")


def _table(report: Report, shown: list[str], tight: bool = False) -> Table:
    about = f"ratios and drops against {report.baseline_name}"
    if report.baseline and (metric := report.baseline.metric) and metric.samples:
        about += f"; {metric.name} on {metric.samples} samples"
    title = printable(f"{report.pipeline}: {report.status} ({about})")
    frame = None if tight else box.HEAVY_HEAD
    table = Table(title=title, title_justify="left", box=frame, pad_edge=not tight)
    table.add_column("stage", overflow="fold")
    origin = report.baseline.same_runtime if report.baseline else None
    names = {"metric": f"{_metric(report)}{chr(10) if tight else ' '}(val)"}
    if origin and origin.runtime != EAGER:
        names[VS_EAGER] = f"vs {report.baseline_name}"
    for column in shown:
        table.add_column(names.get(column, column), justify="right", no_wrap=True)
    for row in stage_rows.build_rows(report):
        if row.measured is None:
            text = Text("skipped" if row.status == "skipped" else f"✗ {row.status}")
            text.style = "" if row.status == "skipped" else "bold red"
            table.add_row(row.name, text, *("–" for _ in shown[1:]))
            continue
        cells = measured_cells(row.measured)
        if stage := row.report:  # else it is the imported model
            passed, total = sum(v.passed for v in stage.verdicts), len(stage.verdicts)
            style = "green" if passed == total else "bold red"
            seconds = f"{stage.seconds:.1f} + {stage.judged_seconds:.1f} s"
            cells["gates"] = Text(f"{passed}/{total}", style=style) if total else "–"
            cells["run + evaluation"] = "cached" if stage.cached else seconds
        table.add_row(row.name, *(cells.get(column, "–") for column in shown))
    return table


def _metric(report: Report) -> str:
    measured = (m.metric for m in (report.baseline, *(s.measurements for s in report.stages)) if m)
    return next((m.name for m in measured if m), "metric")


def measured_cells(m: Measurements) -> dict[str, str | Text]:
    """Return an artifact's figures as text, by column."""
    missing = "–" if m.was_left_out else NOT_MEASURABLE
    return {
        "metric": f"{m.metric.value:.4f}" if m.metric else "–",
        "drop (95 %)": m.metric.drop.cell(m.metric.name) if m.metric and m.metric.drop else "–",
        "size": readable_bytes(m.bytes),
        "smaller": f"{m.bytes_ratio:.2f}×",
        "params": readable_count(m.parameters),
        "MACs": readable_count(m.macs),
        "p50 ms": missing if m.latency_ms.p50 is None else f"{m.latency_ms.p50:.3f}",
        "p95 ms": missing if m.latency_ms.p95 is None else f"{m.latency_ms.p95:.3f}",
        "faster": _ratio(m.same_runtime) if m.same_runtime else "–",
        VS_EAGER: _ratio(m),
        "peak MiB": "–" if m.peak_mebibytes is None else f"{m.peak_mebibytes:.1f}",
    }


def _ratio(measured: SpeedupReport) -> str:
    if measured.speedup is None:
        return "–" if measured.was_left_out else NOT_MEASURABLE
    return f"{measured.speedup:.2f}×"


def print_table(table: Callable[[Console], Table], lines: Iterable[Any]) -> None:
    """Print a table as wide as the terminal, and lines below it."""
    console = wide_console()
    console.print(table(console))
    for line in lines:
        text = line if isinstance(line, Text) else Text(str(line))
        console.print(Text(printable(text.plain), style=text.style), soft_wrap=True)
