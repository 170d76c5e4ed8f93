"""`compress sensitivity`: accuracy loss by channel family and ratio, as a table and a page.

Also the model that this analysis, and that of `compress latency`, are of.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts.eager_model import EagerModel
from compress.common.atomic_files import write_atomically
from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.progress import Progress, silent
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.runner.inputs import measuring_context
from compress.pipelines.runner.run import preview_state
from compress.pipelines.runner.source_model import import_source
from compress.pipelines.system.temp_files import temporary_files
from compress.pipelines.system.templates import render_template
from compress.pipelines.terminal.console import print_result, show_progress

if TYPE_CHECKING:
    from rich.table import Table

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.pruning.prune_channels import PruneChannels
    from compress.pruning.sensitivity_analysis import Sensitivity

SENSITIVITY_PAGE = "sensitivity.html"
PLOT_WIDTH, PLOT_HEIGHT, PLOT_MARGIN = 880, 420, 56  # size of the plot, in view-box units


@contextmanager
def model_to_prune(
    pipeline: PipelineConfig, out: Path, progress: Progress
) -> Iterator[tuple[EagerModel, PruneChannels | None, Context]]:
    """Provide what the first `prune_channels` reads, else the source; that stage; a context."""
    plan, pipeline, context, _ = measuring_context(pipeline, out / "variants", progress)
    planned = next((p for p in plan.stages if p.stage.stage == "prune_channels"), None)
    name = planned.input if planned else SOURCE
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        model: Artifact
        if planned is None or name == SOURCE:
            model = import_source(pipeline, Path(folder) / SOURCE)
        else:
            actions, state = preview_state(pipeline, out, RunOptions(until=name))
            if name not in state.artifacts:
                raise StageFailed(
                    f"{planned.name} reads {name!r}, which is not made yet ({actions[name]}); "
                    f"first: compress run {pipeline.file} --out {out} --until {name}"
                )
            model = state.artifacts[name]
        if not isinstance(model, EagerModel):
            raise StageFailed(f"{name!r} is a {model.kind!r} artifact, expected an eager model")
        context = context.with_root(model.path.with_name("variants"))
        yield model, planned.stage if planned else None, context  # type: ignore[misc]


def show(analysis: Any, file: Path, out: Path | None, **options: Any) -> None:
    """Call `measure_and_write` of an analysis, a module of this package, and print its result."""
    pipeline = PipelineConfig.from_yaml(file)
    directory = out or pipeline.default_out
    with show_progress() as (progress, _):
        found = analysis.measure_and_write(pipeline, directory, progress=progress, **options)
    print_result(found, analysis.lines_below(found, directory), lambda _: analysis.table(found))


def measure_and_write(
    pipeline: PipelineConfig,
    out: Path,
    ratios: Sequence[float] = (0.25, 0.5, 0.75),
    samples: int = 512,
    latency: bool = True,
    progress: Progress = silent,
) -> Sensitivity:
    """Measure the accuracy loss of cutting each channel family alone, and write a page with a plot.

    The model is the input of the first `prune_channels`, or the imported one if there is no such
    stage. The page and `sensitivity.json` go to the results' directory, where earlier models are.
    """
    from compress.pruning.sensitivity_analysis import measure_sensitivity

    invalid = [ratio for ratio in ratios if not 0 < ratio < 1]
    if invalid:
        raise PipelineInvalid(f"--ratio {invalid[0]:g}: expected a fraction between 0 and 1")
    with model_to_prune(pipeline, out, progress) as (model, stage, context):
        found = measure_sensitivity(
            model, context, stage, ratios=sorted(set(ratios)), samples=samples, latency=latency
        )
    write_page(out, pipeline.name, found)
    return found


def table(found: Sensitivity) -> Table:
    """Build a table with one row for each family, the least sensitive first."""
    from rich.table import Table

    title = f"cutting one family alone: {_loss_label(found)}, and what is left of MACs"
    timed = any(p.latency is not None for family in found.families for p in family.points)
    rows = Table(title=f"{title}{' and of latency' if timed else ''}", title_justify="left")
    rows.add_column("family", overflow="fold")
    rows.add_column("channels", justify="right")
    ratios = sorted({point.ratio for family in found.families for point in family.points})
    for ratio in ratios:
        rows.add_column(f"-{100 * ratio:g} %", justify="right", no_wrap=True)
        rows.add_column("MACs", justify="right", no_wrap=True)
        if timed:
            rows.add_column("latency", justify="right", no_wrap=True)
    for family in found.families:
        points = {point.ratio: point for point in family.points}
        cells: list[str] = []
        for ratio in ratios:
            point = points.get(ratio)
            if point is None:
                cells += ["–"] * (3 if timed else 2)
                continue
            lost = f"{point.distance:.4f}" if point.points is None else f"{point.points:.2f}"
            cells += [lost, f"{point.macs:.3f}"]
            if timed:
                cells.append("–" if point.latency is None else f"{point.latency:.2f}")
        rows.add_row(family.name, str(family.channels), *cells)
    return rows


def lines_below(found: Sensitivity, out: Path) -> Iterator[str]:
    """Yield the lines below the table: layers that are not cut, and the path of the plot."""
    for name, reason in found.pinned.items():
        yield f"{name} stays: {reason}"
    yield f"plot: {out / SENSITIVITY_PAGE}"


def write_page(out: Path, name: str, found: Sensitivity) -> None:
    """Write sensitivity.html and sensitivity.json."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "sensitivity.json", found.model_dump_json(indent=1) + "\n")
    shown = {"name": name, "found": found, "loss": _loss_label(found), "plot": plot(found)}
    write_atomically(out / SENSITIVITY_PAGE, render_template("sensitivity.html.jinja", **shown))


def plot(found: Sensitivity) -> dict[str, Any]:
    """Lay out the plot of accuracy loss against MACs saved, for the template."""
    saved = [1 - p.macs for family in found.families for p in family.points]
    losses = [_loss(p, found) for family in found.families for p in family.points]
    right, top = max(saved, default=0) or 1.0, max([*losses, 0.0]) or 1.0
    bottom = min([*losses, 0.0])

    def place(x: float, y: float) -> tuple[float, float]:
        across = PLOT_MARGIN + x / right * (PLOT_WIDTH - 3.5 * PLOT_MARGIN)
        up = (y - bottom) / (top - bottom) * (PLOT_HEIGHT - 2 * PLOT_MARGIN)
        return round(across, 1), round(PLOT_HEIGHT - PLOT_MARGIN - up, 1)

    lines = []
    for number, family in enumerate(found.families):
        marks = [(*place(1 - p.macs, _loss(p, found)), p) for p in family.points]
        lines.append({"family": family, "marks": marks, "hue": 47 * number % 360})
    xs = [(place(right * i / 4, bottom)[0], f"{100 * right * i / 4:.1f}") for i in range(5)]
    steps = [bottom + (top - bottom) * i / 4 for i in range(5)]
    ys = [(place(0, value)[1], f"{value:.3g}") for value in steps]
    sizes = {"width": PLOT_WIDTH, "height": PLOT_HEIGHT, "margin": PLOT_MARGIN}
    return {**sizes, "lines": lines, "xs": xs, "ys": ys}


def _loss_label(found: Sensitivity) -> str:
    by_metric = found.judged_by == "metric"
    return f"points of {found.metric} lost" if by_metric else "relative distance of the outputs"


def _loss(point: Any, found: Sensitivity) -> float:
    return float(point.distance if found.judged_by == "outputs" else point.points)
