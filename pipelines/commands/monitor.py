"""`compress monitor`: what a server's comparisons with the uncompressed model have shown."""

from __future__ import annotations

from pathlib import Path

from compress.common.atomic_files import write_atomically
from compress.common.errors import ArtifactInvalid, GateRefused
from compress.pipelines.reporting.svg_plots import LEFT, LOW_FLOOR, RIGHT, TOP, Plot, axis_for
from compress.pipelines.system.templates import render_template
from compress.pipelines.terminal import console
from compress.serve.shadow.state import ShadowState, read_state


def monitor_command(file: Path, html: Path | None) -> None:
    """Print a state, and write its page; GateRefused where the limit is broken."""
    if (state := read_state(file)) is None:
        raise ArtifactInvalid(
            f"{file}: no such file; `compress serve ARTIFACT --shadow 1%` writes "
            "ARTIFACT.shadow.json"
        )
    if html is not None:
        page = render_template("monitor.html.jinja", name=file.name, state=state, plot=plot(state))
        write_atomically(html, page)
    low, high = state.bounds
    figures = {"lower": low, "upper": high, "evidence": state.evidence}
    console.print_result(state.model_dump(mode="json") | figures, state.lines())
    if state.broken_at:
        raise GateRefused(
            f"{file}: more than {state.of.gate.percent:g} % of the requests are answered otherwise "
            "than by the uncompressed model; see what changed in the inputs, and once that is "
            "settled, stop the server and delete the file to begin anew"
        )


def plot(state: ShadowState) -> Plot | None:
    """Lay out the share of other answers over the requests, its bounds, and the limit."""
    points = [*state.history, (state.requests, state.compared, state.other)]
    points = [point for point in points if point[1]]
    if not points:
        return None
    requests = [point[0] for point in points]
    lows, highs = zip(*(state.bounds_at(*point[1:]) for point in points), strict=True)
    shares = [100 * other / compared for _, compared, other in points]
    limit = state.of.gate.percent
    x_axis = axis_for([0, *requests], LEFT, RIGHT)
    # Bounds of few comparisons are wide, and would make all others look flat.
    top = max(3 * limit, *shares[len(shares) // 4 :], 2 * highs[-1])
    y_axis = axis_for([0.0, min(top, 100.0)], LOW_FLOOR, TOP)
    lines = [
        " ".join(
            f"{x_axis.position(x)},{y_axis.clamped_position(y)}"
            for x, y in zip(requests, values, strict=True)
        )
        for values in (lows, shares, highs, [limit] * len(points))
    ]
    return Plot(
        title="Share of other answers",
        description=f"Now {shares[-1]:.3g} %, between {lows[-1]:.3g} and {highs[-1]:.3g} %; the "
        f"limit is {limit:g} %.",
        x_name="requests",
        y_name="% answered otherwise",
        y_note="with both bounds; flat: the limit",
        xs=[(x_axis.position(v), f"{v:,.0f}") for v in x_axis.ticks(4)],
        ys=[(y_axis.position(v), f"{v:g}") for v in y_axis.ticks(3)],
        floor=LOW_FLOOR,
        lines=tuple(lines),
    )
