"""`compress.optimize` and `compress.auto`: what `init` proposes and `auto` finds, of a module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.in_process import register, register_module
from compress.common.atomic_files import temporary_folder
from compress.common.errors import GateRefused, PipelineInvalid
from compress.common.printable import ShownInNotebooks
from compress.core.gates import MaxDrop, MaxRelativeDrop, gate_class
from compress.core.objectives.task import TaskName, task_named
from compress.core.progress import show_bars
from compress.core.validation_errors import dotted, explain
from compress.functional.in_memory import as_artifact, forward_names, make_splits
from compress.pipelines.api import Pipeline
from compress.pipelines.auto.candidates import CANDIDATES
from compress.pipelines.auto.front import Front, nothing_found
from compress.pipelines.auto.search import search
from compress.pipelines.commands.init import InitOptions, dump_input, render_and_plan
from compress.pipelines.commands.model_traits import inspect_model
from compress.pipelines.config.auto_settings import AutoSettings, Format, Runtime
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.reporting.notebook import NotebookView, view_of
from compress.pipelines.results.schema import REPORT_PAGE, Report
from compress.pipelines.system import yaml_core

if TYPE_CHECKING:
    import torch

    from compress.data.splits import Splits


def in_memory(
    function: str, model: Any, data: Any, **splits: Any
) -> tuple[torch.nn.Module, Splits, dict[str, Any]]:
    """Return a module, its data, and the beginning of a pipeline file that names both."""
    made = make_splits(data, parameters=forward_names(model), **splits)
    if made is None or "val" not in made.datasets:
        raise PipelineInvalid(f"{function} decides by data; pass val=, and train= to calibrate")
    source = as_artifact(model, made, reads=EagerModel)
    loaded = source.load()
    inputs = [dump_input(spec) for spec in source.signature.inputs]
    data_section = {
        "factory": register(lambda: dict(made.datasets), "data"),
        "batch_size": made.batch_size,
        "loader": made.loading.model_dump(mode="json", exclude_defaults=True),
    }
    model_section = {"factory": register_module(loaded), "inputs": inputs}
    return loaded, made, {"version": 1, "model": model_section, "data": data_section}


@dataclass(frozen=True)
class Optimized(ShownInNotebooks):
    """The result of :func:`optimize`."""

    report: Report
    """What was measured of every stage."""
    folder: Path
    """Folder with `report.html`, `report.json` and all artifacts."""
    artifact: Artifact
    """The last stage's artifact: the file to deploy."""

    @property
    def module(self) -> torch.nn.Module:
        """The artifact as a module to call."""
        return self.artifact.module


def optimize(
    model: Any,
    *,
    train: Any = None,
    val: Any = None,
    test: Any = None,
    data: Any = None,
    max_drop: float = 1.0,
    goal: Literal["smaller", "faster", "both"] = "both",
    target: Literal["onnx", "torchscript", "aot"] = "onnx",
    task: TaskName | None = None,
    metric: str | None = None,
    out: Path | str | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Optimized:
    """Make a trained model small and fast by the stages that suit it, and report what was measured.

    Args:
        model: a trained torch.nn.Module, or an artifact of one; it is not changed.
        train: data to calibrate and fine-tune with, in any form that the stages' functions take.
        val: data by which every gate decides.
        test: data that is read once, for the report.
        data: the same as a mapping of splits.
        max_drop: most points (hundredths) of the metric that may be lost; percent of it, where the
            task's gate is max_relative_drop.
        goal: what matters.
        target: format of the last artifact.
        task: what the model is for: its gates and, without `metric`, its metric decide.
        metric: name of a metric; by default it follows from the targets.
        out: folder of the results; by default a temporary one, removed when the process ends.
        progress: whether progress bars are shown; by default on a terminal or in a notebook.
        **options: fields of :class:`~compress.pipelines.config.run_options.RunOptions`.

    Raises:
        GateRefused: more was lost than allowed, or the result is no better; the report is written.
        CompressError: a stage failed.
    """
    loaded, splits, content = in_memory("optimize", model, data, train=train, val=val, test=test)
    folder = temporary_folder() / "optimize" if out is None else Path(out)
    init = InitOptions(goal=goal, target=target)
    task_named(task)  # refuses an unknown one
    found = inspect_model(loaded, splits, trained=True, task=task)
    text, _ = render_and_plan(folder / "pipeline.yaml", content, init, found, inferred=True)
    content = yaml_core.load(text)
    for stage in content["stages"]:
        for gate in stage.get("gates", ()):
            kind = gate_class(gate["gate"])
            if issubclass(kind, MaxDrop | MaxRelativeDrop):
                gate[kind.limit_field] = max_drop
    if metric is not None:
        content["metric"] = metric
    pipeline = Pipeline.model_validate({"name": "optimize", **content})
    with show_bars(progress) as shown:
        report = pipeline.run(folder, progress=shown, **options)
    artifact = Artifact.from_directory(folder / "artifacts" / report.stages[-1].name)
    return Optimized(report, folder, artifact)


@dataclass(frozen=True)
class AutoResult(ShownInNotebooks):
    """The result of :func:`auto`."""

    front: Front
    """Every model that was checked; `front.best` is the name of the chosen one."""
    folder: Path
    """Folder with `front.json`, and the runs of all checked models."""

    @property
    def artifact(self) -> Artifact:
        """The chosen model: the file to deploy."""
        name = str(self.front.best)
        candidate = self.front.by_name[name].candidate
        folder = self.folder / CANDIDATES / name / "artifacts" / candidate.export
        return Artifact.from_directory(folder)

    @property
    def module(self) -> torch.nn.Module:
        """The chosen model as a module to call."""
        return self.artifact.module


def auto(
    model: Any,
    *,
    train: Any = None,
    val: Any = None,
    test: Any = None,
    data: Any = None,
    max_drop: float | None = None,
    latency: str | dict[str, float] | None = None,
    size: str | None = None,
    memory: str | None = None,
    time: str = "10m",
    formats: Sequence[Format] = ("float", "int8_static"),
    runtimes: Sequence[Runtime] = ("onnx",),
    float_layers: int = 8,
    blocks: bool = False,
    widths: dict[str, Any] | None = None,
    recovery: dict[str, Any] | None = None,
    task: TaskName | None = None,
    metric: str | None = None,
    out: Path | str | None = None,
    progress: bool | None = None,
) -> AutoResult:
    """Search the depth, widths and formats of a trained model that lose least under limits.

    Args:
        model: a trained torch.nn.Module, or an artifact of one; it is not changed.
        train: data to calibrate and refit with, in any form that the stages' functions take.
        val: data that the search decides by with one half, and confirms with the other.
        test: data that is not read.
        data: the same as a mapping of splits.
        max_drop: most points (hundredths) of the metric that may be lost.
        latency: longest median time of a call, with its unit, as `2ms`; or `{"p95_ms": 2}`.
        size: largest file, with its unit, as `1MB`.
        memory: most memory that opening and calling the file takes, with its unit, as `64MiB`.
        time: how long to search, with its unit.
        formats: numbers that the model may compute with.
        runtimes: what the file may be for: `onnx`, `openvino`.
        float_layers: most layers that may stay float in a quantized format.
        blocks: whether whole blocks may be removed.
        widths: settings of `space.widths` in a pipeline file.
        recovery: settings of `space.recovery` in a pipeline file; by default nothing is trained.
        task: what the model is for.
        metric: name of a metric; by default it follows from the targets.
        out: folder of the results; by default a temporary one, removed when the process ends.
        progress: whether progress bars are shown; by default on a terminal or in a notebook.

    Raises:
        PipelineInvalid: there is no data to decide by, or a value has no unit.
        GateRefused: no model that was checked meets all limits; the message names the nearest.
        CompressError: the model cannot be traced, exported or measured.
    """
    _, _, content = in_memory("auto", model, data, train=train, val=val, test=test)
    limits = {"max_drop": max_drop, "latency": latency, "size": size, "memory": memory}
    settings: dict[str, Any] = {
        "limits": {name: value for name, value in limits.items() if value is not None},
        "time": time,
        "space": {
            "formats": list(formats),
            "float_layers": float_layers,
            "blocks": blocks,
            "runtimes": list(runtimes),
            "widths": widths or {},
            "recovery": recovery,
        },
    }
    given = {"task": task, "metric": metric}
    content |= {name: value for name, value in given.items() if value is not None}
    try:
        pipeline = PipelineConfig.model_validate({"name": "auto", **content, "auto": settings})
    except ValidationError as error:
        content["auto"] = settings
        raise PipelineInvalid(
            explain(error, content, PipelineConfig, lambda place: f"auto: {dotted(place[-1:])}")
        ) from None
    folder = temporary_folder() / "auto" if out is None else Path(out)
    with show_bars(progress) as shown:
        options = RunOptions(progress=shown)
        front = search(pipeline, pipeline.auto or AutoSettings(), folder, options)
    if front.best is None:
        raise GateRefused(nothing_found(front))
    return AutoResult(front, folder)


@view_of.register
def _(result: Optimized) -> NotebookView:
    view = view_of(result.report)
    return replace(view, lines=[*view.lines, f"all of it: {result.folder / REPORT_PAGE}"])


@view_of.register
def _(result: AutoResult) -> NotebookView:
    view = view_of(result.front)
    return replace(view, lines=[*view.lines, f"its file: {result.artifact.payload_path}"])
