"""`compress init`: write a first pipeline file for a model, and validate it."""

from __future__ import annotations

import ast
import inspect
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from compress.artifacts import hf_folder
from compress.artifacts.eager_model import EagerModel
from compress.checkpoint.file_kinds import kind_of
from compress.common.atomic_files import write_atomically
from compress.common.config import first_problem
from compress.common.errors import ArtifactInvalid, CompressError, PipelineInvalid
from compress.common.factories import REFERENCE, Reference, resolve
from compress.common.signature import TensorSpec
from compress.core.objectives.task import TASKS
from compress.export.imported.exported_files import KINDS
from compress.pipelines.commands.model_traits import (
    ModelTraits,
    inspect_model,
    task_of_library,
    with_data,
)
from compress.pipelines.config import model_spec
from compress.pipelines.config.data_spec import DATA_CLASSES, FileData
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.yaml_source import Source
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.inputs import resolve_inputs
from compress.pipelines.runner.source_model import import_source
from compress.pipelines.system import yaml_core
from compress.pipelines.system.temp_files import temporary_files
from compress.pipelines.system.templates import render_template
from compress.serve.torchserve.stage import PackageTorchServe

if TYPE_CHECKING:
    from compress.data.splits import Splits
    from compress.pipelines.planning.plan import Plan

    Ask = Callable[[str, str, Callable[[str], object]], str]

Target = Literal["onnx", "torchscript", "aot"]
Goal = Literal["smaller", "faster", "both"]
NO_ANSWER = "none"
QUESTIONS = {
    "model": "Which model shall be compressed (folder, file, timm:NAME, module:callable)?",
    "checkpoint": "Which file holds its trained weights?",
    "data": "Which data shall judge it (file, folder, module:callable)?",
    "target": "Which format shall the file to deploy have: onnx, torchscript or aot?",
    "goal": "What shall the model become: smaller, faster or both?",
    "inputs": "Which inputs does it take, with spaces between (name=batch,3,224,224)?",
}
TIMM_PREFIX = "timm:"
MODEL_FORMS = (
    "a Hugging Face folder, timm:resnet18, an .onnx, .pt2 or .ts file, a .py file, or "
    "module:callable"
)
NO_HEAD = "has no weights for"  # in the error of a Hugging Face folder without a head
LAYERS_IN_WORDS = {
    "convolutional": "a model of convolutions",
    "linear": "a model of linear or recurrent layers",
    "other": "a model of other layers",
    "exported": "an exported model",
}
OPTION_OF_SETTING = {
    "model.inputs": "--input",
    "model.checkpoint": "--checkpoint",
    **{f"data.{key}": "--data" for key in DATA_CLASSES},
    **dict.fromkeys((*(f"model.{key}" for key in model_spec.MODEL_CLASSES), "model"), "--model"),
}
"""The command-line option behind each setting, for error messages."""
COMMENT_OF_SETTING = {
    "factory": "        # module:callable",
    "huggingface": "        # folder with config.json and weights",
    "labels": "        # of the data; the folder's model has no head for them",
    "data.factory": '        # → {"train": Dataset, "val": Dataset, ...}',
    "data.prepare": "        # prepare with the mean and std that the model was trained with",
    "checkpoint": "        # read without executing anything in it",
}


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
        found = {"file": str(self.file), "family": self.family}
        return {**found, "stages": list(self.stages), "warnings": list(self.warnings)}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the output without `--json`."""
        yield f"{self.file}: for {LAYERS_IN_WORDS[self.family]}: {' → '.join(self.stages)}"
        yield f"next: compress run {self.file}"


def write_draft(
    file: Path, options: InitOptions, force: bool = False, ask: Ask | None = None
) -> Draft:
    """Write a pipeline file for a model; `ask` prompts for missing options."""
    if file.exists() and not force:
        raise PipelineInvalid(f"{file} exists and is not overwritten; name another, or use --force")
    with naming_options(file, options):
        found = draft(file, prompt_for_missing(options, ask) if ask else options)
    try:
        write_atomically(file, found.text)
    except OSError as error:
        raise PipelineInvalid(f"{file} cannot be written ({error.strerror})") from None
    return found


@contextmanager
def naming_options(file: Path, options: InitOptions) -> Iterator[None]:
    """Name the option in place of the setting of a file that is not written yet, in errors.

    Its folder is made, as paths in the file lead through it (`../photos`), and removed on errors.
    """
    missing = [folder for folder in file.parents if not folder.exists()]
    with suppress(OSError):  # whoever writes the file names the problem
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except CompressError as error:
        with suppress(OSError):  # not empty any more
            for folder in missing:
                folder.rmdir()
        for setting, option in OPTION_OF_SETTING.items():
            if setting == "model.inputs" and not options.inputs and options.data is not None:
                option = "--data (--input declares other inputs)"  # samples show them
            if str(error).startswith(place := f"{file}: {setting}: "):
                raise type(error)(f"{option}: {str(error).removeprefix(place)}") from error
        raise


def draft(file: Path, options: InitOptions) -> Draft:
    """Return the pipeline file for a model, without writing it."""
    content = initial_content(file, options)
    first, data, inferred = resolve_inputs(_pipeline(file, content))
    if data is not None and (head := _head_for(first, data, options.task)):
        content["model"] |= head
        first, data, inferred = resolve_inputs(_pipeline(file, content))
    content["model"]["inputs"] = [dump_input(spec) for spec in first.model.inputs or ()]
    content["model"] |= first.model.model_dump(include={"axes"}, exclude_defaults=True)
    task: Any = options.task  # one of TASKS: initial_content refuses others
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        try:
            source = import_source(_pipeline(file, content), Path(folder) / model_spec.SOURCE)
            trained = bool({"checkpoint", "huggingface", "file"} & content["model"].keys())
        except ArtifactInvalid as error:
            if data is None or NO_HEAD not in str(error):
                raise
            # A pretrained body, whose head is to be trained on the data.
            pipeline = _pipeline(file, {**content, "stages": [{"stage": "train", "epochs": 1}]})
            source, trained = import_source(pipeline, Path(folder) / model_spec.SOURCE), False
        if isinstance(source, EagerModel):
            module = source.load()
            task = task or task_of_library(module, first)
            found = inspect_model(module, data, trained, source.signature, task)
        else:
            # Exported elsewhere: only its outputs and the data show what it is for.
            found = ModelTraits("exported", source.payload_bytes, True, {}, task, kind=source.kind)
            with source.open() as predict:
                found = with_data(found, predict, data, source.signature)
    text, plan = render_and_plan(file, content, options, found, bool(inferred))
    return Draft(file, text, found.family, tuple(s.name for s in plan.stages), plan.warnings)


def render_and_plan(
    file: Path, content: dict[str, Any], options: InitOptions, found: ModelTraits, inferred: bool
) -> tuple[str, Plan]:
    """Return the file's text, with stages that suit what was found, and its plan."""
    origin = "as the samples show them" if found.samples else "as the model declares them"
    lacks_torchserve = any(need.missing() for need in PackageTorchServe.requirements)
    package = "package_triton" if lacks_torchserve else "package_torchserve"
    text = render_template(
        "pipeline.yaml.jinja",
        file=file,
        options=options,
        content=content,
        found=found,
        layers=LAYERS_IN_WORDS[found.family],
        hints=defaultdict(str, COMMENT_OF_SETTING),
        origin=origin if inferred else "as given",
        package=package if found.kind in ("onnx", "torchscript") else None,
    )
    # What is written is what was checked, comments and quotes included.
    return text, build_plan(_pipeline(file, yaml_core.load(text)))


def initial_content(file: Path, options: InitOptions) -> dict[str, Any]:
    """Return the file's content from the options, with one placeholder stage."""
    if options.model is None:
        raise PipelineInvalid(
            f"compress init needs a model: {MODEL_FORMS} (or --slurm for a batch script)"
        )
    model, code = model_section(options, file.parent)
    if not (options.inputs or options.data is not None or declares_inputs(options.model)):
        raise PipelineInvalid(
            "compress init needs what the model takes: --input name=batch,3,224,224, or --data "
            "FILE, FOLDER or module:callable, whose samples show it"
        )
    if options.inputs:
        model["inputs"] = parse_inputs(options.inputs)
    if options.task is not None and options.task not in TASKS:
        raise PipelineInvalid(f"--task {options.task!r} is not one of {', '.join(TASKS)}")
    content: dict[str, Any] = {"version": 1, "model": model}
    if code is not None and code.resolve() != file.parent.resolve():
        content["code"] = relative_path(file.parent, code)
    if options.data is not None:
        content["data"] = _data_section(options, file.parent, model)
    if options.task is not None:
        content["task"] = options.task
    return {**content, "stages": [{"stage": "export_program"}]}


def _data_section(options: InitOptions, folder: Path, model: dict[str, Any]) -> dict[str, Any]:
    """Return the `data:` section for `--data`: a callable, or files as they lie."""
    text = str(options.data)
    if not Path(text).exists():
        return {"factory": parse_reference(text, "--data ")}
    from compress.pipelines.data.describe import describe_files

    found = describe_files(Path(text))
    key = next(iter(found))
    found[key] = relative_path(folder, Path(text))
    if "audio" in found and "huggingface" in model:
        del found["prepare"]  # its own file says it
    if "images" in found and not {"huggingface", "timm"} & model.keys():
        shape = [*(model.get("inputs") or [{}])[0].get("shape", ())]
        is_last = len(shape) == 4 and shape[1] not in (1, 3) and shape[3] in (1, 3)  # channels
        size = shape[1:3] if is_last else shape[2:]
        if ("file" not in model and not size) or any(isinstance(side, str) for side in size):
            raise PipelineInvalid(
                "--data: images become inputs of one size; give it as --input name=batch,3,224,224"
            )
        form = {**({"size": size} if size else {}), **({"layout": "hwc"} if is_last else {})}
        # Nothing else says it; pixels go from 0 to 1 then.
        found["prepare"] = {**form, "mean": [0.0], "std": [1.0]}
    return found


def _head_for(pipeline: PipelineConfig, data: Splits, task: str | None) -> dict[str, Any]:
    """Return settings of a head for the data's classes, where a pretrained model has none."""
    model, spec = pipeline.model, pipeline.data
    if not isinstance(model, model_spec.HuggingFaceModel) or task not in (None, "classification"):
        return {}
    labels = getattr(next(iter(data.datasets.values())), "class_names", ())
    folder = pipeline.folder / model.huggingface
    if not labels or "Classification" in type(hf_folder.read_architecture(folder, None)).__name__:
        return {}
    form = spec.form if isinstance(spec, FileData) else None
    kind = form.kind if form else "image"
    return {"task": f"{kind}-classification", "labels": [*labels]}


def _pipeline(file: Path, content: dict[str, Any]) -> PipelineConfig:
    try:
        pipeline = PipelineConfig.model_validate({"name": file.stem, **content})
    except ValidationError as error:
        raise PipelineInvalid(f"{file}: {first_problem(error)}") from None
    # Errors name the file, and paths are relative to it, although it is not written yet.
    pipeline._source = Source(file, content, {})
    return pipeline


@dataclass(frozen=True)
class InitOptions:
    """Options of `compress init`."""

    model: str | None = None
    """A folder, a file, `timm:NAME` or `module:callable`."""
    arguments: Sequence[str] = ()
    """Of the factory, each `name=value`."""
    checkpoint: Path | str | None = None
    """Relative to the working directory."""
    inputs: Sequence[str] = ()
    """Each `name=batch,3,224,224` or `name=batch,length:int64`."""
    data: str | None = None
    """A file, a folder or `module:callable`."""
    target: Target = "onnx"
    goal: Goal = "both"
    task: str | None = None
    """What the model is for, where neither it nor the data shows that."""


def prompt_for_missing(options: InitOptions, ask: Ask) -> InitOptions:
    """Return the options with missing ones prompted for; if they name a model, only its inputs."""
    if options.model is None:
        model = ask(QUESTIONS["model"], "", check_model)
        asks = options.checkpoint is None and not has_weights(model)
        checkpoint = ask(QUESTIONS["checkpoint"], NO_ANSWER, str) if asks else options.checkpoint
        data = options.data or ask(QUESTIONS["data"], NO_ANSWER, _check_data)
        target: Any = ask(QUESTIONS["target"], options.target, _one_of(Target))
        goal: Any = ask(QUESTIONS["goal"], options.goal, _one_of(Goal))
        options = replace(
            options,
            model=model,
            checkpoint=None if checkpoint == NO_ANSWER else checkpoint,
            data=None if data == NO_ANSWER else data,
            target=target,
            goal=goal,
        )
    if options.data is None and not options.inputs and not declares_inputs(str(options.model)):
        answer = ask(QUESTIONS["inputs"], "", lambda text: parse_inputs(text.split()))
        options = replace(options, inputs=answer.split())
    return options


def check_model(text: str) -> str:
    """Check that a text has one of the forms of a model, and return it."""
    path = Path(text.partition(".py:")[0] + ".py" if ".py:" in text else text)
    is_known = path.is_dir() or (path.exists() and path.suffix in (*KINDS, ".py"))
    if text.startswith(TIMM_PREFIX) or is_known or REFERENCE.match(text):
        return text
    missing = "" if path.exists() else ": there is no such file or folder here, and it"
    kind, advice = kind_of(path)
    but = f", but {kind}: {advice}" if kind else ""
    raise PipelineInvalid(f"--model {text!r}{missing} is not one of: {MODEL_FORMS}{but}")


def has_weights(model: str) -> bool:
    """Whether a model is a folder or a file that holds its weights."""
    return Path(model).is_dir() or Path(model).suffix in KINDS


def declares_inputs(model: str) -> bool:
    """Whether a model itself shows its inputs: not a factory, and not TorchScript."""
    known = model.startswith(TIMM_PREFIX) or has_weights(model)
    return known and KINDS.get(Path(model).suffix) != "torchscript"


def parse_reference(text: str, option: str = "") -> str:
    """Check that a text has the form `module:callable`, and return it."""
    try:
        return TypeAdapter(Reference).validate_python(text)
    except ValidationError:
        raise PipelineInvalid(
            f"{option}{text!r} is neither a file or folder here nor of the form module:callable, "
            "such as my_model:classifier"
        ) from None


def parse_arguments(text: Sequence[str]) -> dict[str, Any]:
    """Parse a factory's arguments, each `name=value` with a YAML value."""
    found = {}
    for each in text:
        name, equals, value = each.partition("=")
        try:
            found[name] = yaml_core.load(value)
        except (yaml.YAMLError, ValueError):
            equals = ""
        if not equals or not name.isidentifier():
            raise PipelineInvalid(f"--argument {each!r}: expected name=value, such as classes=10")
    return found


def parse_inputs(text: Sequence[str]) -> list[dict[str, Any]]:
    """Parse input tensors, each as `name=batch,3,224,224`; a scalar has a type alone."""
    inputs = []
    for each in text:
        name, _, rest = each.partition("=")
        sizes, _, dtype = rest.partition(":")
        # Without a type, sizes were forgotten.
        written = sizes.replace(" ", "").split(",") if sizes or not dtype else []
        shape = [int(s) if s.isdecimal() else s for s in written]
        content = {"name": name, "shape": shape, "dtype": dtype or "float32"}
        try:
            inputs.append(dump_input(TensorSpec.model_validate(content)))
        except ValidationError as error:
            raise PipelineInvalid(
                f"--input {each!r}: {first_problem(error)}; expected name=batch,3,224,224, "
                "name=batch,length:int64, or name=:int64 for a scalar"
            ) from None
    return inputs


def dump_input(spec: TensorSpec) -> dict[str, Any]:
    """Return an input's settings without defaults, as one writes them in the file."""
    return spec.model_dump(mode="json", exclude_defaults=True)


def _check_data(text: str) -> None:
    if text != NO_ANSWER and not Path(text).exists():
        parse_reference(text)


def _one_of(known: Any) -> Callable[[str], None]:
    def check(text: str) -> None:
        if text not in get_args(known):
            raise PipelineInvalid(f"{text!r} is not one of {', '.join(get_args(known))}")

    return check


def model_section(options: InitOptions, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the `model:` section with paths relative to `folder`, and the folder of its code."""
    text = check_model(str(options.model))
    path, code = Path(text), None
    arguments = parse_arguments(options.arguments)
    if text.startswith(TIMM_PREFIX):
        model: dict[str, Any] = {"timm": text.removeprefix(TIMM_PREFIX)}
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise PipelineInvalid(
                f"--model: {text} is a folder without config.json; give {MODEL_FORMS}"
            )
        model = {"huggingface": relative_path(folder, path)}
    elif path.suffix in KINDS:
        model = {"file": relative_path(folder, path)}
    elif text.endswith(".py") or ".py:" in text:
        file, _, name = text.partition(":")
        code = Path(file).parent
        model = {"factory": _reference_in(Path(file), name)}
    else:
        module = text.partition(":")[0].partition(".")[0]
        # The file's folder is the default of `code:`; name this one where only it has the module.
        code = next(
            (f for f in (folder, Path()) if (f / f"{module}.py").exists() or (f / module).is_dir()),
            None,
        )
        model = {"factory": text}
    if "factory" in model:
        _check_arguments(model["factory"], code or folder, arguments)
    if arguments:
        _refuse_beside(model, "--argument", "config.json says how it is built")
        model["arguments"] = arguments
    if options.checkpoint is not None:
        _refuse_beside(model, "--checkpoint", "it has its weights")
        model["checkpoint"] = relative_path(folder, Path(options.checkpoint))
    return model, code


def relative_path(folder: Path, path: Path) -> str:
    """Turn a path relative to the working directory into one relative to a folder."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


def _refuse_beside(model: dict[str, Any], option: str, reason: str) -> None:
    kind = next(iter(model))
    if kind in ("huggingface", "file"):
        raise PipelineInvalid(
            f"{option} goes with a factory or timm:NAME; of {model[kind]} {reason}"
        )


def _reference_in(file: Path, name: str) -> str:
    """Return `module:callable` of a file's only module class, or else its only function."""
    from torch import nn

    if not file.is_file():
        raise PipelineInvalid(f"--model: {file}: no such file")
    if not file.stem.isidentifier():
        raise PipelineInvalid(
            f"--model: {file} cannot be imported by that name; rename it, as {file.stem!r} is no "
            "name of a Python module"
        )
    if name:
        return parse_reference(f"{file.stem}:{name}", "--model ")
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError) as error:
        raise PipelineInvalid(f"--model: {file} is not Python: {error}") from None
    defined = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    functions = [f.name for f in defined if isinstance(f, ast.FunctionDef) and f.name[0] != "_"]
    classes = []
    for node in defined:
        if isinstance(node, ast.ClassDef):
            found: Any = resolve(f"{file.stem}:{node.name}", file.parent)
            classes += [node.name] if issubclass(found, nn.Module) else []
    names = classes or functions
    if len(names) != 1:
        kind = "classes of torch.nn.Module" if classes else "functions and no torch.nn.Module"
        raise PipelineInvalid(
            f"--model: {file} has {len(names)} {kind}; name one, as {file}:NAME: "
            f"{', '.join(dict.fromkeys([*classes, *functions]))}"
            if names
            else f"--model: {file} has neither a class of torch.nn.Module nor a function"
        )
    return f"{file.stem}:{names[0]}"


def _check_arguments(reference: str, folder: Path, arguments: dict[str, Any]) -> None:
    """Refuse a factory whose required arguments are missing; other errors come when it is built."""
    try:
        parameters = inspect.signature(resolve(reference, folder)).parameters.values()
    except (CompressError, ValueError, TypeError):
        return
    required = [p for p in parameters if p.default is p.empty]
    named = [p.name for p in required if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [name for name in named if name not in arguments]
    if missing:
        given = " ".join(f"--argument {name}=…" for name in missing)
        raise PipelineInvalid(
            f"--model: {reference} takes {', '.join(missing)}, without a default; give {given}"
        )
