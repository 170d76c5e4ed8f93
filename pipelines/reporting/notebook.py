"""What notebooks and terminals show of a result: a verdict, a table, a plot of candidates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from compress.artifacts.artifact import Artifact
from compress.pipelines.reporting import stage_rows
from compress.pipelines.reporting.terminal_table import measured_cells
from compress.pipelines.results.schema import FIDELITY, Report
from compress.pipelines.system.templates import readable_bytes, readable_count, render_template
from compress.quantization.numeric_debug.fidelity_report import Fidelity

if TYPE_CHECKING:
    from compress.pipelines.reporting.svg_plots import Plot

TEXT_COLUMNS = ("model", "misses")
STAGE_COLUMNS = ("size", "smaller", "faster", "vs eager", "p50 ms")
_numbers = itertools.count(1)  # ids of plots, of which a notebook has several


@dataclass(frozen=True)
class NotebookView:
    """What is shown of a result."""

    title: str
    lines: Sequence[str]
    """The verdict, and what to do next."""
    columns: Sequence[str]
    """Empty where each row has a name and a text."""
    rows: Sequence[Sequence[str]]
    plot: Plot | None = None
    status: Literal["passed", "refused"] = "passed"


def html_of(result: Any) -> str:
    """Return a result as a few kB of HTML without scripts, for light and dark notebooks.

    Args:
        result: an artifact, a report, or what `optimize`, `auto` and `bench` return.

    Raises:
        TypeError: it is none of these.
    """
    id = f"compress-{next(_numbers)}"
    return render_template("notebook.html.jinja", view=view_of(result), id=id)


def view_table(result: Any) -> Table:
    """Build the table of a result's view for a terminal."""
    view = view_of(result)
    table = Table(title=view.title, title_justify="left")
    for name in view.columns:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for row in view.rows:
        table.add_row(*row)
    return table


@singledispatch
def view_of(result: Any) -> NotebookView:
    """Return what is shown of a result; each module registers that of its own."""
    raise TypeError(f"found a {type(result).__name__}, expected an artifact, a report or a result")


@view_of.register
def _(report: Report) -> NotebookView:
    rows = stage_rows.build_rows(report)
    fronts = stage_rows.pareto_fronts(report, rows)
    found = stage_rows.headline(report)
    lines = [f"{found.gains}: deploy {found.artifact}/{found.file}"] if found else []
    lines += [f"✗ {name}: {why}" for name, why in stage_rows.failure_reasons(rows)]
    measured = [row.measured.metric for row in rows if row.measured and row.measured.metric]
    name = measured[0].name if measured else "metric"
    table = []
    for row in rows:
        cells = measured_cells(row.measured) if row.measured else {}
        drop = f" ({cells['drop (95 %)']})" if cells.get("drop (95 %)", "–") != "–" else ""
        figures = [str(cells.get(column, "–")) for column in STAGE_COLUMNS]
        status = "no gates" if row.status == "measured" else row.status
        table.append(
            [f"{row.number} {row.name}", status, f"{cells.get('metric', '–')}{drop}", *figures]
        )
    return NotebookView(
        title=f"{report.pipeline}: {report.status}, {stage_rows.count_by_status(rows)}",
        lines=lines,
        columns=("stage", "verdict", f"{name} (drop)", *STAGE_COLUMNS),
        rows=table,
        plot=(fronts.time or fronts.size) if fronts else None,
        status="passed" if report.status == "passed" else "refused",
    )


@view_of.register
def _(artifact: Artifact) -> NotebookView:
    facts: dict[str, Any] = dict(artifact.manifest.facts)
    steps = [step.stage for step in artifact.manifest.lineage]
    return NotebookView(
        title=f"{' → '.join(steps) or 'model'} ({artifact.kind})",
        lines=[*map(str, facts.get("warnings", ()))],
        columns=(),
        rows=[*_artifact_rows(artifact, facts)],
    )


def _artifact_rows(artifact: Artifact, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "file", f"{artifact.payload_name}, {readable_bytes(artifact.payload_bytes)}"
    for name, count in (("parameters", artifact.parameters()), ("MACs", artifact.macs())):
        if count is not None:
            yield name, readable_count(count)
    signature = artifact.signature
    shapes = (f"{s.name}: {s.dtype} [{', '.join(map(str, s.shape))}]" for s in signature.inputs)
    yield "inputs", "; ".join(shapes)
    yield "outputs", ", ".join(spec.name for spec in signature.outputs)
    if FIDELITY in facts:
        yield "against float", Fidelity.model_validate(facts[FIDELITY]).line()
    yield "folder", str(artifact.path)
