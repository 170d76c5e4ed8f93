"""The front of a search as a table for a terminal, and as a page with a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from pipelines.auto.front import FILE, missed_limits
from pipelines.auto.judge import CANDIDATES
from pipelines.reporting.html_page import render_page
from pipelines.reporting.svg_plots import Plot, Point, scatter_plot

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipelines.auto.candidates import CheckedModel
    from pipelines.auto.front import Front

PAGE = "front.html"
COLUMNS = (
    "model",
    "blocks removed",
    "groups cut",
    "float layers",
    "ms",
    "predicted",
    "MB",
    "drop",
    "confirmed",
    "misses",
)


def front_table(front: Front) -> Table:
    """Build a table of the models that no other one beats."""
    title = "models that no other one beats; * the best within all limits"
    if front.predicted_for is not None:
        title += f"; latencies are predicted for {front.predicted_for}"
    rows = Table(title=title)
    rows.add_column("point", no_wrap=True)
    for name in COLUMNS:
        rows.add_column(name, justify="left" if name in ("model", "misses") else "right")
    known = {model.name: model for model in front.checked}
    for number, name in enumerate(front.points, 1):
        mark = " *" if name == front.best else ""
        rows.add_row(f"{number}{mark}", *cells_of(front, known[name]))
    return rows


def cells_of(front: Front, model: CheckedModel) -> tuple[str, ...]:
    """Return a model's figures as text, in the order of :data:`COLUMNS`."""
    predicted, drop, confirmed = (
        "" if value is None else f"{value:.3g}"
        for value in (model.predicted_ms, model.drop, model.confirmed_drop)
    )
    if model.confirmed_between is not None:
        low, high = model.confirmed_between
        confirmed += f" ({low:.2g} to {high:.2g})"
    latency = "" if model.is_predicted else f"{model.latency_ms:.3g}"
    predicted = f"{model.latency_ms:.3g}" if model.is_predicted else predicted
    figures = (latency, predicted, f"{model.bytes / 1e6:.3g}", drop, confirmed)
    counts = (len(own) for own in (model.removed_blocks, model.widths, model.float_layers))
    missed = ", ".join(missed_limits(front.limits, model))
    return (model.name, *map(str, counts), *figures, missed)


def lines_below(front: Front, out: Path) -> Iterator[str]:
    """Yield what was found, and where it is."""
    known = {model.name: model for model in front.checked}
    if front.best is not None:
        yield f"best: {front.line(known[front.best])}"
        yield f"its run: {out / CANDIDATES / front.best}"
    else:
        yield "no model that was checked meets all limits"
    if front.predicted_for is not None:
        yield f"latencies are predicted for {front.predicted_for}; run the points' pipelines there"
    yield f"page: {out / PAGE}; figures: {out / FILE}; pipelines: {out / 'points'}"


def front_page(front: Front) -> str:
    """Render the page: what was found, a plot of drop against latency, and all figures."""
    return render_page(
        "front.html.jinja",
        front=front,
        known={model.name: model for model in front.checked},
        plot=_plot(front),
        columns=COLUMNS,
        cells_of=cells_of,
    )


def _plot(front: Front) -> Plot | None:
    models = [model for model in front.checked if model.drop is not None]
    points = [
        Point(
            label=model.name if model.name in front.points else "",
            title=front.line(model),
            x=model.latency_ms,
            y=model.drop or 0.0,
            refused=bool(missed_limits(front.limits, model)),
        )
        for model in models
    ]
    if not points:
        return None
    return scatter_plot(
        points,
        {i for i, model in enumerate(models) if model.name in front.points},
        title="Drop of the metric against latency",
        names=("predicted ms a call" if front.predicted_for else "ms a call", "points lost"),
        shown="{:g}".format,
    )
