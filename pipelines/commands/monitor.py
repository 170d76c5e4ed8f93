"""`compress monitor`: what the requests of a server have shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compress.common.atomic_files import write_atomically
from compress.common.errors import ArtifactInvalid, GateRefused
from compress.pipelines.reporting.svg_plots import Plot, Point, scatter_plot
from compress.pipelines.system.templates import render_template
from compress.pipelines.terminal import console
from compress.serve.shadow.state import DriftState, ShadowState, read_state

DRAWN = 24  # most points of the plot, whose intervals would else cover each other


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
    content = state.figures() | state.model_dump(mode="json", include={"of", "history"})
    console.print_result(content, state.lines())
    if state.broken_at:
        raise GateRefused(
            f"{file}: {state.alarm}; see what changed in the inputs, and once that is settled, "
            "stop the server and delete the file to begin anew"
        )


def plot(state: ShadowState | DriftState) -> Plot | None:
    """Lay out the share of other answers over the requests, its bounds, and the limit.

    Without an uncompressed model, lay out the evidence in place of the share.
    """
    if not state.compared:
        return None
    points = [*state.history[:: 1 + len(state.history) // DRAWN]]
    drawn = []
    if isinstance(state, ShadowState):
        points.append((state.requests, state.compared, state.other))
        limit, title, name = state.limit, "Share of other answers", "% answered otherwise"
        for requests, compared, other in points:
            low, share, high = state.percents(compared, other)
            text = f"{requests} requests: {share:.3g} %, {low:.3g} to {high:.3g} %"
            drawn.append(Point("", text, requests, share, y_interval=(low, high)))
        note, shown_limit = f"{state.compared} compared; lines end at the bounds", f"{limit:g} %"
    else:
        points.append((state.requests, state.compared, state.evidence))
        limit, title, name = state.needed_evidence, "Evidence that inputs differ", "evidence"
        for requests, _, evidence in points:
            drawn.append(Point("", f"{requests} requests: {evidence:.3g}", requests, evidence))
        note, shown_limit = f"{state.compared} scored", f"{limit:.3g}"
    ends = [Point("limit", f"limit {shown_limit}", drawn[i].x, limit) for i in (0, -1)]
    shown = scatter_plot(
        [*ends, *drawn],
        (0, 1),
        title=title,
        names=("requests", name),
        shown="{:,.0f}".format,
    )
    return replace(shown, description=drawn[-1].title, y_note=note)
