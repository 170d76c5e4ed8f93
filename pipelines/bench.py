"""`compress bench`: which of several artifacts, or of a model's exports, answers fastest here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from compress.common.atomic_files import write_atomically
from compress.common.config import Result, Settings
from compress.common.errors import PipelineInvalid
from compress.common.printable import ShownInNotebooks
from compress.core.context import Context
from compress.export.fastest.stage import BenchCell, BenchRow, Runtime, export_to, measure_fastest
from compress.export.imported.exported_files import opened_artifact
from compress.export.web.page import ONNXRUNTIME_WEB, web_page
from compress.functional.in_memory import Inputs, as_artifact, forward_names, make_splits
from compress.pipelines.reporting.notebook import NotebookView, view_of
from compress.pipelines.reporting.svg_plots import Plot, Point, pareto_indices, scatter_plot
from compress.pipelines.reporting.terminal_table import NOT_MEASURABLE
from compress.pipelines.system.machine_info import machine
from compress.pipelines.system.templates import render_template
from compress.profiling.benchmark import MEASURED_SECONDS

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact

BATCHES = (1, 8, 32)
COLUMNS = ("model", "ms a call", "95 % interval", "rows/s", "faster", "95 % interval")


def bench(
    *models: Any,
    runtimes: Sequence[str] = (),
    batch: Sequence[int] | None = None,
    threads: Sequence[int] = (1,),
    val: Any = None,
    example_inputs: Inputs | None = None,
    seconds: float = MEASURED_SECONDS,
    web: Path | str | None = None,
) -> Bench:
    """Measure models in turn in this process, and name the fastest.

    Args:
        models: artifacts, their folders or exported files, or a module in memory; the first one is
            what the others' speedup is against.
        runtimes: formats that the model, then a single one, is also exported to with default
            settings, checked, and measured in: `onnx`, `torchscript`, `aot`, `openvino`.
        batch: rows of a call; by default 1, 8 and 32, or the one size that a model takes.
        threads: CPU threads of a call.
        val: samples to measure with; by default seeded inputs that fit the signature.
        example_inputs: inputs that show what a module takes, where there is no `val`.
        seconds: how long each model is measured at each batch size and number of threads.
        web: HTML file to write: a page with the one ONNX file among the models, or their exports,
            that measures it in the browser that opens it, and compares its answers.

    Raises:
        PipelineInvalid: no model, an unknown runtime, or models whose inputs differ.
        Unavailable: `web` is given, and onnxruntime-web is missing.
        CompressError: a model cannot be opened.
    """
    if web is not None:
        ONNXRUNTIME_WEB.need_folder()
    for name in runtimes:
        if name not in get_args(Runtime):
            expected = ", ".join(get_args(Runtime))
            raise PipelineInvalid(f"runtimes: {name!r} is unknown; expected some of {expected}")
    if not models:
        raise PipelineInvalid("models: found none, expected an artifact or a module")
    if runtimes and len(models) > 1:
        raise PipelineInvalid(
            f"runtimes: exports one model, and {len(models)} were given; name one, or no runtimes"
        )
    for name, numbers in (("batch", batch), ("threads", threads)):
        if numbers is not None and (not numbers or min(numbers) < 1):
            raise PipelineInvalid(f"{name}: found {list(numbers)}, expected numbers from 1")
    with TemporaryDirectory(prefix="compress-bench-") as folder, ExitStack() as stack:
        opened = [
            stack.enter_context(opened_artifact(Path(m))) if isinstance(m, str | Path) else m
            for m in models
        ]
        splits = make_splits(None, parameters=forward_names(opened[0]), val=val)
        artifacts = _named([as_artifact(model, splits, example_inputs) for model in opened])
        context = Context(root=Path(folder), data=splits)
        (name, source), *_ = artifacts.items()
        wanted = tuple(r for r in get_args(Runtime) if r in runtimes and r != source.kind)
        exported, failures = export_to(wanted, source, context)
        artifacts |= {r if r != name else f"{r} export": a for r, a in exported.items()}
        own = [a.signature.smallest_batch for a in artifacts.values() if not a.signature.batch_axis]
        batches = batch or (own[:1] if own else BATCHES)
        cells = measure_fastest(artifacts, context, batches, threads, seconds)
        if web is not None:
            page = _web_page(artifacts, context, cells, seconds)
            write_atomically(Path(web), page)
        measured = tuple(
            BenchedModel(name=name, kind=a.kind, digest=a.digest, bytes=a.payload_bytes)
            for name, a in artifacts.items()
        )
    return Bench(machine=machine(), models=measured, cells=tuple(cells), not_exported=failures)


def _web_page(
    artifacts: Mapping[str, Artifact], context: Context, cells: Sequence[BenchCell], seconds: float
) -> str:
    """Return the page of the one ONNX file, with its latencies here on one thread."""
    names = [name for name, artifact in artifacts.items() if artifact.kind == "onnx"]
    if len(names) != 1:
        raise PipelineInvalid(
            f"web: expected one ONNX file, found {', '.join(names) or 'none'}; name one artifact "
            "of export_onnx, or add `onnx` to the runtimes"
        )
    name, artifact = names[0], artifacts[names[0]]
    baseline = {
        cell.batch: row.latency.p50
        for cell in cells
        for row in cell.rows
        if row.model == name and cell.threads == 1 and not row.unreliable_reason
    }
    batches = {c.batch: context.measured_batches(artifact.signature, c.batch) for c in cells}
    facts = {"ONNX Runtime": f"{version('onnxruntime')}, {machine()['processor']}"}
    return web_page(name, artifact, batches, seconds=seconds, baseline=baseline, facts=facts)


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers of an option such as `--batch 1,8,32`; raise PipelineInvalid if none."""
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise PipelineInvalid(f"{option} {text}: expected numbers with commas, such as 1,8,32")
    return tuple(int(part) for part in parts)


def _named(artifacts: list[Artifact]) -> dict[str, Artifact]:
    """Return artifacts by the name of their folder, or by its path where the name is not unique."""
    counts = Counter(artifact.path.name for artifact in artifacts)
    named = {str(a.path) if counts[a.path.name] > 1 else a.path.name: a for a in artifacts}
    if len(named) < len(artifacts):
        raise PipelineInvalid("models: an artifact was given twice; name each one once")
    return named


class BenchedModel(Settings):
    """A model that was measured."""

    name: str
    kind: str
    digest: str
    bytes: int
    """Size of the file to deploy."""


class Bench(ShownInNotebooks, Result):
    """Latencies of models, measured in turn."""

    machine: dict[str, str | int | None]
    models: tuple[BenchedModel, ...]
    """The first one is what the others' speedup is against."""
    cells: tuple[BenchCell, ...]
    """Figures of all models, for each number of threads and batch size."""
    not_exported: dict[str, str] = {}
    """Runtimes that were asked for and are not measured, and why."""

    def lines(self) -> Iterator[str]:
        """Yield which model is fastest for each batch size and number of threads."""
        yield from (cell.verdict for cell in self.cells)
        for runtime, reason in self.not_exported.items():
            yield f"{runtime} was not measured: {reason}"


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


def _plots(found: Bench) -> Iterator[Plot]:
    """Yield a plot of throughput against latency for each number of threads."""
    for threads in dict.fromkeys(cell.threads for cell in found.cells):
        cells = [cell for cell in found.cells if cell.threads == threads]
        rows = [(c, row) for c in cells for row in c.rows if not row.unreliable_reason]
        points = [
            Point(
                label=f"{row.model} {cell.batch}",
                title=f"{row.model} at batch {cell.batch}",
                x=row.latency.p50,
                y=row.rows_per_second,
                x_interval=(low, high),
                y_interval=(1000 * cell.batch / high, 1000 * cell.batch / low),
            )
            for cell, row in rows
            for low, high in [row.latency.p50_interval]
        ]
        if points:
            calls = [row.latency.calls for _, row in rows]
            yield scatter_plot(
                points,
                pareto_indices(points, higher_is_better=True),
                title=f"Throughput against latency, {threads} thread{'s' * (threads > 1)}",
                names=("ms a call", "rows/s, higher is better"),
                shown="{:g}".format,
                counted=f"medians of n = {min(calls)} to {max(calls)} calls",
            )


def bench_page(found: Bench) -> str:
    """Render the page: verdicts, a plot of throughput for each number of threads, all figures."""
    shown: dict[str, Any] = {"found": found, "columns": COLUMNS, "cells_of": cells_of}
    return render_template("bench.html.jinja", plots=[*_plots(found)], **shown)


@view_of.register
def _(found: Bench) -> NotebookView:
    return NotebookView(
        title=f"against {found.models[0].name}, on {found.machine['processor']}",
        lines=[*found.lines()],
        columns=("threads", "batch", *COLUMNS),
        rows=[
            (str(cell.threads), str(cell.batch), *cells_of(row))
            for cell in found.cells
            for row in cell.rows
        ],
        plot=next(_plots(found), None),
    )
