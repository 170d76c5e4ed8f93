"""`compress.optimize`: the pipeline that `compress init` proposes, for a module in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.in_process import register, register_module
from compress.common.atomic_files import temporary_folder
from compress.common.errors import PipelineInvalid
from compress.core.gates import MaxDrop, MaxRelativeDrop, gate_class
from compress.core.objectives.task import TaskName, task_named
from compress.core.progress import show_bars
from compress.functional.in_memory import as_artifact, forward_names, make_splits
from compress.pipelines.api import Pipeline
from compress.pipelines.commands.init import InitOptions, dump_input, inspect_model, render_and_plan
from compress.pipelines.system import yaml_core

if TYPE_CHECKING:
    import torch

    from compress.data.splits import Splits
    from compress.pipelines.results.schema import Report


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
class Optimized:
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
