"""Makes a function of a stage: a module and data in memory in, the stage's artifact out."""

from __future__ import annotations

import inspect
import logging
import shutil
import textwrap
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import ValidationError

from compress.artifacts.artifact import Artifact
from compress.artifacts.in_process import register, register_module
from compress.common.atomic_files import temporary_folder
from compress.common.config import descriptions
from compress.common.errors import PipelineInvalid, first_line
from compress.common.lazy_modules import torch
from compress.common.process import random_state_kept, torch_threads
from compress.core.validation_errors import Location, closest, dotted, explain

if TYPE_CHECKING:
    from compress.core.objectives.task import TaskName
    from compress.core.stage import Stage

Writes = TypeVar("Writes", bound=Artifact)
log = logging.getLogger(__name__)

NOT_ARGUMENTS = ("stage", "name", "input")
"""Settings of a pipeline's step that a function does not have."""
ARGUMENTS = """
Args:
    model: a torch.nn.Module, a torch.export program, or an artifact; not changed.
    data, train, val, calibration: a DataLoader, a Dataset, a list of samples, tensors
        or arrays (inputs, targets), a Hugging Face dataset, or a mapping of splits.
    example_inputs: inputs that show what the model takes, where no data do.
    out, file: folder of the artifact, by default a temporary one; copy of its file.
    task, task_loss, metric: by default they follow from the targets.
"""
HELP_WIDTH = 84  # characters of a line


def stage_help(stage: type[Stage[Any, Any]], takes_file: bool, texts: Mapping[str, str]) -> str:
    """Return a function's docstring, which fits a screen: an example, the first words on settings.

    `texts` describe the settings in full.
    """
    name = str(stage.model_fields["stage"].default)
    about, _, steps = (inspect.getdoc(stage) or "").partition("\n\n    - ")
    steps = yaml.safe_load(f"    - {steps.partition(chr(10) * 2)[0]}") if steps else []
    example: dict[str, Any] = next((step for step in steps if step.get("stage") == name), {})
    call = ["model", *(["'model.file'"] if takes_file else [])]
    call += [f"{n}={value!r}" for n, value in example.items() if n in texts and n != "gates"]
    call.append("example_inputs=(x,)" if takes_file else "data=loader")
    # What a caller has to give comes first, what all stages take last.
    fields = stage.model_fields
    names = sorted(texts, key=lambda n: (not fields[n].is_required(), n in ("gates", "exclude")))
    count = max(4, min(12, 30 - len(names)))  # the names of the others take lines, too
    lines = [f"{n}: {texts[n]}" for n in names[:count]]
    shown = [textwrap.shorten(line, HELP_WIDTH - 4, placeholder=" …") for line in lines]
    if others := names[count:]:
        shown += textwrap.wrap(f"Also: {', '.join(others)}.", HELP_WIDTH - 4)
    shown.append(f"In full: compress.{name}.settings[NAME]")
    code = textwrap.fill(f"small = compress.{name}({', '.join(call)})", HELP_WIDTH - 8)
    paragraphs = "\n\n".join(about.split("\n\n")[:2])
    arguments = ARGUMENTS.rstrip() + "\n" + textwrap.indent("\n".join(shown), "    ")
    return f"{paragraphs}\n\nExample:\n{textwrap.indent(code, '    ')}\n{arguments}\n"


def stage_function(
    stage: type[Stage[Any, Writes]], *, takes_file: bool = False
) -> Callable[..., Writes]:
    """Return a function that runs a stage; its keyword arguments are the stage's settings.

    With ``takes_file`` its second argument is the file that the artifact's payload is copied to.
    """
    name = str(stage.model_fields["stage"].default)
    fields = {n: f for n, f in stage.model_fields.items() if n not in NOT_ARGUMENTS}
    model, file, _, _, *common = inspect.signature(_run_stage).parameters.values()
    # A setting that is named as a common argument, such as the device of `export_aot`, is the one.
    common = [parameter for parameter in common if parameter.name not in fields]
    known = {*fields, *(parameter.name for parameter in common)}

    def function(model: Any, file: Path | str | None = None, /, **arguments: Any) -> Writes:
        if file is not None and not takes_file:
            raise TypeError(f"{name}() takes data by keyword: {name}(model, data=…)")
        for argument in arguments:
            if argument not in known:
                close = closest(argument, known)
                hint = f"; did you mean {close!r}?" if close else ""
                raise TypeError(f"{name}() has no argument {argument!r}{hint}")
        settings = {n: arguments.pop(n) for n in [*arguments] if n in fields}
        device = str(arguments.get("device", "cpu"))
        # Libraries that a stage imports add filters, and users' models draw numbers.
        with (
            torch_threads(torch.get_num_threads()),
            warnings.catch_warnings(),
            random_state_kept(device),
        ):
            artifact: Writes = _run_stage(model, file, stage, settings, **arguments)
        return artifact

    function.__name__ = function.__qualname__ = name
    function.__module__ = "compress"
    said = descriptions(stage)
    texts = {n: " ".join(said.get(n, "").split()) for n in fields}
    function.settings = texts  # type: ignore[attr-defined]
    function.__doc__ = stage_help(stage, takes_file, texts)
    settings = [
        inspect.Parameter(
            setting,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.is_required()
            else field.get_default(call_default_factory=True),
        )
        for setting, field in fields.items()
    ]
    positional = [model, file] if takes_file else [model]
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=p.empty) for p in (*positional, *settings, *common)],
        return_annotation=stage.writes(),
    )
    return function


def _run_stage(
    model: Any,
    file: Path | str | None = None,
    /,
    stage: Any = None,
    settings: Any = None,
    *,
    data: Any = None,
    train: Any = None,
    val: Any = None,
    calibration: Any = None,
    example_inputs: Any = None,
    out: Path | str | None = None,
    task: TaskName | None = None,
    task_loss: Any = None,
    metric: str | None = None,
    device: str = "cpu",
    threads: int = 1,
    seed: int = 0,
    progress: bool | None = None,
) -> Any:
    # The functions' signatures are wanted by help and completion before torch is.
    from compress.core.context import Context
    from compress.core.metrics import Metric, default_metric
    from compress.core.objectives.loss import Loss
    from compress.core.objectives.task import task_named
    from compress.core.progress import show_bars
    from compress.functional.in_memory import as_artifact, forward_names, make_splits

    name = str(stage.model_fields["stage"].default)
    if file is not None:
        file = _target(name, file)
    if isinstance(settings.get("student"), torch.nn.Module):
        settings["student"] = {"factory": register_module(settings["student"])}
    models = {n: v for n, v in settings.items() if isinstance(v, torch.nn.Module | Artifact)}
    settings |= {setting: setting for setting in models}  # in place of an earlier stage's name
    try:
        step = stage.model_validate(settings)
    except ValidationError as error:

        def describe(place: Location) -> str:
            return f"{name}: {dotted(place)}" if place else name

        raise PipelineInvalid(explain(error, settings, stage, describe)) from None
    given = {"train": train, "val": val, "calibration": calibration}
    splits = make_splits(data, parameters=forward_names(model), **given)
    source = as_artifact(model, splits, example_inputs, stage.reads())
    others = {n: as_artifact(model, splits, example_inputs) for n, model in models.items()}
    if splits is not None:
        names, dtypes = zip(*((x.name, x.dtype) for x in source.signature.inputs), strict=True)
        splits = replace(splits, input_names=names, input_dtypes=dtypes)
    loss_name = register(task_loss, "loss") if callable(task_loss) else task_loss
    loss = Loss(loss_name, task=task_named(task)).infer_targets(splits)
    context = Context(
        root=temporary_folder() / name if out is None else Path(out),
        data=splits,
        loss=loss,
        metric=Metric(metric) if metric else default_metric(loss),
        device=device,
        threads=threads,
        seed=seed,
        artifacts={"source": source, **others},
    )
    with show_bars(progress) as shown:
        artifact = step(source, replace(context, progress=shown))
    if out is not None and getattr(artifact, "only_here", False):
        log.warning(
            "%s: %s can be loaded in this process alone, where its class is defined; put that into "
            "a file of its own, or export the model",
            name,
            out,
        )
    if file is not None:  # the one to deploy, and those that it refers to by name: large weights
        payload = artifact.payload_name
        for part in artifact.model_files:
            target = file if part == payload else file.parent / part
            if part != payload and Path(part).stem == Path(payload).stem:
                target = file.with_suffix(Path(part).suffix)  # OpenVINO's, found by the file's name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(artifact.path / part, target)
    return artifact


def _target(name: str, file: Any) -> Path:
    """Return the file that an artifact is copied to; PipelineInvalid before the stage runs."""
    try:
        path = Path(file)
        if path.is_dir():
            raise PipelineInvalid(f"{name}: file {file!r} is a directory, expected a file's name")
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # refuses names that no file can have
    except (TypeError, ValueError, OSError) as error:
        raise PipelineInvalid(f"{name}: file: {first_line(error)}") from error
    return path
