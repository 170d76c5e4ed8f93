"""A first pipeline file for a model: the model is looked at, and the file proved valid."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.errors import CompressError, PipelineInvalid
from pipelines.commands import init_options
from pipelines.commands.init_advice import SMALL_BYTES, ModelTraits, inspect_model, propose_stages
from pipelines.config.model_spec import SOURCE
from pipelines.config.pipeline import PipelineConfig
from pipelines.config.yaml_source import Source
from pipelines.planning.planner import build_plan
from pipelines.runner.inputs import import_source, resolve_inputs
from pipelines.system.temp_files import temporary_files
from pipelines.system.templates import render_template

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipelines.commands.init_options import Ask, InitOptions
    from pipelines.planning.plan import Plan

TEMPLATE = "pipeline.yaml.jinja"
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
"""Which option each setting of the file comes from."""


@dataclass(frozen=True)
class Draft:
    """A pipeline file that is valid, and what it was written from."""

    file: Path
    text: str
    family: str
    stages: tuple[str, ...]
    warnings: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        """Return what was written, for machines."""
        return {
            "file": str(self.file),
            "family": self.family,
            "stages": list(self.stages),
            "warnings": list(self.warnings),
        }

    def lines(self) -> Iterator[str]:
        """Yield what was written, for people."""
        yield f"{self.file}: for a model of {LAYERS[self.family]}: {' → '.join(self.stages)}"
        yield f"next: compress run {self.file}"


def write_draft(
    file: Path, options: InitOptions, force: bool = False, ask: Ask | None = None
) -> Draft:
    """Write a pipeline file for a model.

    Args:
        file: what to write.
        options: what is told of the model.
        force: whether a file that is there is written over.
        ask: asks for what is missing; None where nobody is there to answer.

    Raises:
        PipelineInvalid: there is such a file, or what is told of the model or the data is wrong.
        CompressError: the model or its checkpoint cannot be read, or a library is missing.
    """
    if file.exists() and not force:
        raise PipelineInvalid(f"{file} exists and is not overwritten; name another, or use --force")
    try:
        found = draft(file, init_options.prompt_for_missing(options, ask) if ask else options)
    except CompressError as error:
        raise type(error)(_name_option(str(error), file)) from error
    try:
        write_atomically(file, found.text)
    except OSError as error:
        raise PipelineInvalid(f"{file} cannot be written ({error.strerror})") from None
    return found


def draft(file: Path, options: InitOptions) -> Draft:
    """Return the pipeline file for a model, without writing it.

    Raises:
        CompressError: what is told of the model or the data is wrong.
    """
    content = initial_content(file, options)
    begun, data, inferred = resolve_inputs(_pipeline(file, content))
    content["model"]["inputs"] = [
        init_options.dump_input(spec) for spec in begun.model.inputs or ()
    ]
    settled = _pipeline(file, content)
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        source: Any = import_source(settled, Path(folder) / SOURCE)
        found = inspect_model(source.load(), data, trained=options.checkpoint is not None)
    text, plan = render_and_plan(file, content, options, found, bool(inferred))
    names = tuple(planned.name for planned in plan.stages)
    return Draft(file, text, found.family, names, plan.warnings)


def render_and_plan(
    file: Path, content: dict[str, Any], options: InitOptions, found: ModelTraits, inferred: bool
) -> tuple[str, Plan]:
    """Return the file's text, with stages that suit what was found, and its plan.

    Raises:
        CompressError: no such file would be valid.
    """
    text = render_template(
        TEMPLATE,
        {"yaml": _flow},
        file=file,
        options=options,
        content=content,
        found=found,
        layers=LAYERS[found.family],
        inferred=inferred,
        stages=propose_stages(found, options.target, options.goal),
        small=found.weight_bytes < SMALL_BYTES and options.goal != "faster",
    )
    # What is written is what was checked, comments and quotes included.
    return text, build_plan(_pipeline(file, yaml.safe_load(text)))


def initial_content(file: Path, options: InitOptions) -> dict[str, Any]:
    """Return the file's content as far as it is told; its one stage stands for those to come.

    Raises:
        PipelineInvalid: too little is told, or something that has another form.
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
    code = _code_folder(file.parent, options.model)
    content: dict[str, Any] = {"version": 1, **({"code": code} if code else {}), "model": model}
    if options.data is not None:
        content["data"] = {"factory": init_options.parse_reference(options.data, "--data ")}
    return {**content, "stages": [{"stage": "export_program"}]}


def _relative_path(folder: Path, path: Path) -> str:
    """Return a path of the working directory's as one relative to a folder."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


def _code_folder(folder: Path, model: str) -> str:
    """Return the working directory, relative to the file's, where the model's module lies there."""
    module = model.partition(":")[0].partition(".")[0]
    here = [p for p in (folder, Path()) if (p / f"{module}.py").exists() or (p / module).is_dir()]
    return _relative_path(folder, Path()) if here and here[0] != folder else ""


def _pipeline(file: Path, content: dict[str, Any]) -> PipelineConfig:
    try:
        pipeline = PipelineConfig.model_validate({"name": file.stem, **content})
    except ValidationError as error:
        raise PipelineInvalid(f"{file}: {error.errors()[0]['msg']}") from None
    pipeline._source = Source(file, content, {})
    return pipeline


def _flow(value: Any) -> str:
    """Return a value in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _name_option(message: str, file: Path) -> str:
    """Return an error with the option in place of the setting that it became."""
    for setting, option in OPTIONS.items():
        if message.startswith(f"{file}: {setting}: "):
            return f"{option}: {message.removeprefix(f'{file}: {setting}: ')}"
    return message
