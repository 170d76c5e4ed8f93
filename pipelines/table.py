"""The report as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from pipelines.plan import SOURCE
from pipelines.report import readable_bytes, readable_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelines.report import Measurements, Report

COLUMNS = ("size", "smaller", "params", "MACs", "p50 ms", "p95 ms", "faster", "gates", "")


def stage_table(report: Report) -> Table:
    """Return one row per stage; ratios are against the baseline, latency is at batch 1."""
    metric = report.baseline.metric if report.baseline else None
    title = f"{report.pipeline}: {report.status} (ratios against {report.baseline_name})"
    table = Table(title=title, title_justify="left")
    table.add_column("stage", no_wrap=True)
    for column in (f"{metric.name} (val)" if metric else "metric", *COLUMNS):
        table.add_column(column, justify="right", no_wrap=True)
    if report.baseline and report.baseline_name == SOURCE:
        table.add_row(SOURCE, *_cells(report.baseline), "–", "")
    for stage in report.stages:
        passed, total = sum(v.passed for v in stage.verdicts), len(stage.verdicts)
        style = "green" if passed == total else "bold red"
        gates = Text(f"{passed}/{total}", style=style) if total else Text("–")
        how = "cached" if stage.cached else f"{stage.seconds:.1f} s"
        table.add_row(stage.name, *_cells(stage.measurements), gates, how)
    return table


def gate_lines(report: Report) -> Iterator[Text]:
    """Yield one line per verdict."""
    for stage in report.stages:
        for v in stage.verdicts:
            found = v.reason or f"{v.value:.5g}"
            mark, style = ("✓", "green") if v.passed else ("✗", "bold red")
            against = f" against {v.against}" if v.against else ""
            yield Text(f"{mark} {stage.name}: {v.rule}{against}: {found}", style=style)


def _cells(m: Measurements) -> tuple[str, ...]:
    return (
        f"{m.metric.value:.4f}" if m.metric else "–",
        readable_bytes(m.bytes),
        f"{m.bytes_ratio:.2f}×",
        readable_count(m.parameters),
        readable_count(m.macs),
        f"{m.latency_ms.p50:.3f}",
        f"{m.latency_ms.p95:.3f}",
        f"{m.speedup:.2f}×",
    )
