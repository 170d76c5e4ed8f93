"""The result of `compress bench` as a table for a terminal and as a page with plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from compress.pipelines.reporting.svg_plots import Plot, Point, pareto_indices, scatter_plot
from compress.pipelines.reporting.terminal_table import NOT_MEASURABLE
from compress.pipelines.system.templates import render_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.export.fastest.measure import BenchRow
    from compress.pipelines.bench import Bench

COLUMNS = ("model", "ms a call", "95 % interval", "rows/s", "faster", "95 % interval")


def bench_table(found: Bench) -> Table:
    """Build a table with one row for each model, batch size and number of threads."""
    table = Table(title=f"against {found.models[0].name}", title_justify="left")
    for name in ("threads", "batch"):
        table.add_column(name, justify="right")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for cell in found.cells:
        for row in cell.rows:
            start = () if row is not cell.rows[0] else (str(cell.threads), str(cell.batch))
            table.add_row(*(start or ("", "")), *cells_of(row), end_section=row is cell.rows[-1])
    return table


def cells_of(row: BenchRow) -> tuple[str, ...]:
    """Return a row's figures as text; what is too uncertain is not shown."""
    if row.unreliable_reason:
        return (row.model, NOT_MEASURABLE, "", "", "", "")
    (low, high), (least, most) = row.latency.p50_interval, row.speedup_interval
    return (
        row.model,
        f"{row.latency.p50:.3f}",
        f"{low:.3f} – {high:.3f}",
        f"{row.rows_per_second:,.0f}",
        f"{row.speedup:.3g}×",
        f"{least:.3g} – {most:.3g}",
    )


def bench_page(found: Bench) -> str:
    """Render the page: verdicts, a plot for each number of threads, all figures."""
    return render_page(
        "bench.html.jinja",
        found=found,
        plots=list(_plots(found)),
        columns=COLUMNS,
        cells_of=cells_of,
    )


def _plots(found: Bench) -> Iterator[Plot]:
    """Yield a plot of throughput against latency for each number of threads."""
    for threads in dict.fromkeys(cell.threads for cell in found.cells):
        points = [
            Point(
                label=f"{row.model} {cell.batch}",
                title=f"{row.model} at batch {cell.batch}",
                x=row.latency.p50,
                y=row.rows_per_second,
                x_interval=row.latency.p50_interval,
            )
            for cell in found.cells
            for row in cell.rows
            if cell.threads == threads and not row.unreliable_reason
        ]
        if points:
            yield scatter_plot(
                points,
                pareto_indices(points, higher_is_better=True),
                title=f"Throughput against latency, {threads} thread{'s' * (threads > 1)}",
                names=("ms a call", "rows/s"),
                shown="{:g}".format,
            )
