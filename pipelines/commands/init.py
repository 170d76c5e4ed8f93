"""`compress init`: write a first pipeline file for a model, and validate it."""

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
    """Write a pipeline file for a model.

    Args:
        file: what to write.
        options: the command line's options.
        force: whether an existing file is overwritten.
        ask: prompts for missing options; None without a terminal.

    Raises:
        PipelineInvalid: the file exists, or an option is wrong.
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
        CompressError: an option is wrong.
    """
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
    code = _code_folder(file.parent, options.model)
    content: dict[str, Any] = {"version": 1, **({"code": code} if code else {}), "model": model}
    if options.data is not None:
        content["data"] = {"factory": init_options.parse_reference(options.data, "--data ")}
    return {**content, "stages": [{"stage": "export_program"}]}


def _relative_path(folder: Path, path: Path) -> str:
    """Turn a path relative to the working directory into one relative to a folder."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


def _code_folder(folder: Path, model: str) -> str:
    """Return the `code:` folder: the working directory if it has the model's module, else empty."""
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
    """Format a value as one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _name_option(message: str, file: Path) -> str:
    """Replace the setting at the start of an error message by the option that it came from."""
    for setting, option in OPTIONS.items():
        if message.startswith(f"{file}: {setting}: "):
            return f"{option}: {message.removeprefix(f'{file}: {setting}: ')}"
    return message
