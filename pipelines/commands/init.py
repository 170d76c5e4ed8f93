"""`compress init`: write a first pipeline file for a model, and validate it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.errors import CompressError, PipelineInvalid
from pipelines.commands import init_options
from pipelines.config.model_spec import SOURCE
from pipelines.config.pipeline import PipelineConfig
from pipelines.config.yaml_source import Source
from pipelines.planning.planner import build_plan
from pipelines.runner.inputs import import_source, resolve_inputs
from pipelines.system.temp_files import temporary_files
from pipelines.system.templates import render_template

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from compress.core.task_targets import TargetKind
    from compress.data.splits import Splits
    from pipelines.commands.init_options import Ask, InitOptions
    from pipelines.planning.plan import Plan

Family = Literal["convolutional", "linear", "other"]

MIN_CALIBRATION_SAMPLES, DEFAULT_CALIBRATION_SAMPLES = 16, 512
MOST_TARGETS_READ = 64
"""Most samples whose targets are read to find out whether they are labels or numbers."""
SMALL_BYTES = 2**18
"""Below this, the graph description dominates a file's size, so that a size gate makes no sense."""
LAYERS = {
    "convolutional": "convolutions",
    "linear": "linear or recurrent layers",
    "other": "other layers",
}
OPTIONS = {
    "model.inputs": "--input",
    "model.checkpoint": "--checkpoint",
    "model.factory": "--model",
    "data.factory": "--data",
    "model": "--model",
}
"""The command-line option behind each setting, for error messages."""


@dataclass(frozen=True)
class Draft:
    """A validated pipeline file that is not written yet, and the model's family."""

    file: Path
    text: str
    family: str
    stages: tuple[str, ...]
    warnings: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """Return the content of `--json`."""
        return {
            "file": str(self.file),
            "family": self.family,
            "stages": list(self.stages),
            "warnings": list(self.warnings),
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the output without `--json`."""
        yield f"{self.file}: for a model of {LAYERS[self.family]}: {' → '.join(self.stages)}"
        yield f"next: compress run {self.file}"


def write_draft(
    file: Path, options: InitOptions, force: bool = False, ask: Ask | None = None
) -> Draft:
    """Write a pipeline file for a model; `ask` prompts for missing options.

    Raises:
        PipelineInvalid: the file exists and is not to be overwritten, or an option is wrong.
        CompressError: the model or its checkpoint cannot be read, or a library is missing.
    """
    if file.exists() and not force:
        raise PipelineInvalid(f"{file} exists and is not overwritten; name another, or use --force")
    try:
        found = draft(file, init_options.prompt_for_missing(options, ask) if ask else options)
    except CompressError as error:
        # The file is not written yet: name the option in place of the setting.
        for setting, option in OPTIONS.items():
            if str(error).startswith(place := f"{file}: {setting}: "):
                raise type(error)(f"{option}: {str(error).removeprefix(place)}") from error
        raise
    try:
        write_atomically(file, found.text)
    except OSError as error:
        raise PipelineInvalid(f"{file} cannot be written ({error.strerror})") from None
    return found


def draft(file: Path, options: InitOptions) -> Draft:
    """Return the pipeline file for a model, without writing it."""
    content = initial_content(file, options)
    first, data, inferred = resolve_inputs(_pipeline(file, content))
    content["model"]["inputs"] = [
        init_options.dump_input(spec) for spec in first.model.inputs or ()
    ]
    with_inputs = _pipeline(file, content)
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        source: Any = import_source(with_inputs, Path(folder) / SOURCE)
        found = inspect_model(source.load(), data, trained=options.checkpoint is not None)
    text, plan = render_and_plan(file, content, options, found, bool(inferred))
    names = tuple(planned.name for planned in plan.stages)
    return Draft(file, text, found.family, names, plan.warnings)


def render_and_plan(
    file: Path, content: dict[str, Any], options: InitOptions, found: ModelTraits, inferred: bool
) -> tuple[str, Plan]:
    """Return the file's text, with stages that suit what was found, and its plan."""
    text = render_template(
        "pipeline.yaml.jinja",
        file=file,
        options=options,
        content=content,
        found=found,
        layers=LAYERS[found.family],
        inferred=inferred,
    )
    # What is written is what was checked, comments and quotes included.
    return text, build_plan(_pipeline(file, yaml.safe_load(text)))


def initial_content(file: Path, options: InitOptions) -> dict[str, Any]:
    """Return the file's content from the options, with one placeholder stage.

    Raises:
        PipelineInvalid: an option is missing or malformed.
    """
    if options.model is None:
        raise PipelineInvalid(
            "compress init needs a model: --model module:callable (or --slurm for a batch script)"
        )
    if options.data is None and not options.inputs:
        raise PipelineInvalid(
            "compress init needs what the model takes: --input name=batch,3,224,224, or --data "
            "module:callable, whose samples show it"
        )
    model: dict[str, Any] = {"factory": init_options.parse_reference(options.model, "--model ")}
    if options.arguments:
        model["arguments"] = init_options.parse_arguments(options.arguments)
    if options.checkpoint is not None:
        model["checkpoint"] = _relative_path(file.parent, Path(options.checkpoint))
    if options.inputs:
        model["inputs"] = init_options.parse_inputs(options.inputs)
    content: dict[str, Any] = {"version": 1, "model": model}
    # The file's folder is the default of `code:`; name this one where only it has the module.
    module = options.model.partition(":")[0].partition(".")[0]
    folders = [f for f in (file.parent, Path()) if _has_module(f, module)]
    if folders and folders[0] != file.parent:
        content["code"] = _relative_path(file.parent, Path())
    if options.data is not None:
        content["data"] = {"factory": init_options.parse_reference(options.data, "--data ")}
    return {**content, "stages": [{"stage": "export_program"}]}


def _relative_path(folder: Path, path: Path) -> str:
    """Turn a path relative to the working directory into one relative to a folder."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


def _pipeline(file: Path, content: dict[str, Any]) -> PipelineConfig:
    try:
        pipeline = PipelineConfig.model_validate({"name": file.stem, **content})
    except ValidationError as error:
        raise PipelineInvalid(f"{file}: {error.errors()[0]['msg']}") from None
    # Errors name the file, and paths are relative to it, although it is not written yet.
    pipeline._source = Source(file, content, {})
    return pipeline


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model and its data that decide which stages are proposed."""

    family: Family
    weight_bytes: int
    trained: bool
    """Whether there is a checkpoint."""
    samples: dict[str, int]
    """Number of samples by split; empty without data."""
    targets: TargetKind | None
    """Kind of targets; None where samples have none, or several labels each."""

    @property
    def small(self) -> bool:
        """Whether the file's size says little about the weights."""
        return self.weight_bytes < SMALL_BYTES

    @property
    def trainable(self) -> bool:
        """Whether there is training data with usable targets."""
        return "train" in self.samples and self.targets is not None

    @property
    def calibrated(self) -> int:
        """Number of calibration samples; 0 where there are too few."""
        available = self.samples.get("calibration", self.samples.get("train", 0))
        enough = available >= MIN_CALIBRATION_SAMPLES
        return min(available, DEFAULT_CALIBRATION_SAMPLES) if enough else 0


def inspect_model(module: nn.Module, data: Splits | None, trained: bool) -> ModelTraits:
    """Inspect the layers, weights and data."""
    samples: dict[str, Any] = dict(data.datasets) if data else {}
    return ModelTraits(
        family=family_of(module),
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        trained=trained,
        samples={name: len(split) for name, split in samples.items()},
        targets=_targets(samples.get("train", next(iter(samples.values())))) if samples else None,
    )


def family_of(module: nn.Module) -> Family:
    """Classify a model by its most frequent kind of layer."""
    from torch import nn

    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    products = (nn.Linear, nn.RNNBase, nn.MultiheadAttention)
    convolution_count = sum(isinstance(layer, convolutions) for layer in module.modules())
    linear_count = sum(isinstance(layer, products) for layer in module.modules())
    if convolution_count and convolution_count >= linear_count:
        return "convolutional"
    return "linear" if linear_count else "other"


def _targets(split: Any) -> TargetKind | None:
    import torch

    from compress.core.task_targets import target_kind
    from compress.data.batch import adapt

    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    found = [adapt(split[i])[1] for i in order[:MOST_TARGETS_READ].tolist()]
    known = [target for target in found if target is not None]
    if not known or any(target.shape != known[0].shape for target in known):
        return None
    kind = target_kind(torch.stack(known))
    return None if kind == "labels" and known[0].dim() else kind
