"""The front of a search as a table for a terminal, and as a page with a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from pipelines.auto.candidates import Candidate
from pipelines.auto.front import FILE, missed_limits, shares_of_limits
from pipelines.auto.judge import CANDIDATES
from pipelines.auto.points import POINTS
from pipelines.reporting.svg_plots import Plot, Point, scatter_plot
from pipelines.system.templates import render_template

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipelines.auto.candidates import CheckedModel
    from pipelines.auto.front import Front

PAGE = "front.html"
WHOLE = Candidate("float").name
TEXT_COLUMNS = ("model", "misses")


def front_table(front: Front) -> Table:
    """Build a table of the models that no other one beats."""
    title = "models that no other one beats; * the best within all limits"
    if front.predicted_for is not None:
        title += f"; latencies are predicted for {front.predicted_for}"
    rows = Table(title=title)
    rows.add_column("point", no_wrap=True)
    known = front.by_name
    cells = [cells_of(front, known[name]) for name in front.points]
    for name in cells[0] if cells else ():
        rows.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for number, own in enumerate(cells, 1):
        mark = " *" if own["model"] == front.best else ""
        rows.add_row(f"{number}{mark}", *own.values())
    return rows


def cells_of(front: Front, model: CheckedModel) -> dict[str, str]:
    """Return a model's figures as text, by the name of their column."""
    limits = front.limits
    confirmed = _text(model.confirmed_drop)
    if model.confirmed_between is not None:
        low, high = model.confirmed_between
        confirmed += f" ({low:.2g} to {high:.2g})"
    is_tail_limited = limits.latency is not None and limits.latency.p95_ms is not None
    return {
        "model": model.name,
        "blocks removed": str(len(model.removed_blocks)),
        "groups cut": str(len(model.widths)),
        "float layers": str(len(model.float_layers)),
        "ms": "" if model.is_predicted else _text(model.latency_ms),
        "predicted": _text(model.latency_ms if model.is_predicted else model.predicted_ms),
        **({"p95 ms": _text(model.p95_ms)} if is_tail_limited else {}),
        "MB": _text(model.bytes / 1e6),
        **({"MiB memory": _text(model.peak_mebibytes)} if limits.memory is not None else {}),
        "drop": _text(model.drop),
        "confirmed": confirmed,
        "misses": ", ".join(missed_limits(limits, model)),
    }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def lines_below(front: Front, out: Path) -> Iterator[str]:
    """Yield what was found, and where it is."""
    if front.best is not None:
        yield f"best: {front.line(front.by_name[front.best], front.limits)}"
        folder = front.folders.get(front.best) if front.predicted_for is None else None
        yield f"its run: {out / folder if folder else out / CANDIDATES / front.best}"
    else:
        yield "no model that was checked meets all limits"
    if front.predicted_for is not None:
        yield f"latencies are predicted for {front.predicted_for}; run the points' pipelines there"
    for what in front.not_searched:
        yield f"not searched: {what}"
    yield f"page: {out / PAGE}; figures: {out / FILE}; pipelines: {out / POINTS}"


def front_page(front: Front) -> str:
    """Render the page: what was found, a plot of drop against latency, and all figures."""
    known = front.by_name
    return render_template(
        "front.html.jinja",
        front=front,
        known=known,
        best=None if front.best is None else known[front.best],
        compared=_compared_with_float(front),
        plot=_plot(front),
        shares=lambda model: ", ".join(
            f"{100 * share:.0f} % of {name}" if share < 2 else f"{share:.3g} times the {name}"
            for name, share in shares_of_limits(front.limits, model).items()
        ),
        cells_of=cells_of,
    )


def _compared_with_float(front: Front) -> str:
    """Say how much faster and smaller the best model is than the float one."""
    known = front.by_name
    if front.best is None or WHOLE not in known or front.best == WHOLE:
        return ""
    best, whole = known[front.best], known[WHOLE]
    return (
        f"The float ONNX file takes {front.base_ms / best.latency_ms:.3g} times as long, and "
        f"{whole.bytes / best.bytes:.3g} times as many bytes."
    )


def _plot(front: Front) -> Plot | None:
    models = [model for model in front.checked if model.drop is not None]
    numbers = {name: str(number) for number, name in enumerate(front.points, 1)}
    points = [
        Point(
            label=numbers.get(model.name, ""),
            title=front.line(model, front.limits),
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
        names=("predicted ms a call" if front.predicted_for else "ms a call", "drop, in points"),
        shown="{:g}".format,
    )
