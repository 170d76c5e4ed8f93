"""Options of `compress init`: parsing, prompts for missing ones, and the `model:` section."""

from __future__ import annotations

import ast
import inspect
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from compress.common.errors import CompressError, PipelineInvalid
from compress.common.factories import REFERENCE, Reference, resolve
from compress.common.signature import TensorSpec
from compress.pipelines.system import yaml_core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Ask = Callable[[str, str, Callable[[str], object]], str]

Target = Literal["onnx", "torchscript", "aot"]
Goal = Literal["smaller", "faster", "both"]
NO_ANSWER = "none"
TIMM_PREFIX = "timm:"
TORCHSCRIPT_ENDINGS = (".ts", ".torchscript", ".pt", ".pth")
EXPORTED_ENDINGS = (".onnx", ".pt2", *TORCHSCRIPT_ENDINGS)
MODEL_FORMS = (
    "a Hugging Face folder, timm:resnet18, an .onnx, .pt2 or .ts file, a .py file, or "
    "module:callable"
)


def model_and_file(
    what: str | None, file: Path | None, model: str | None
) -> tuple[str | None, Path]:
    """Return the model and the file to write, of arguments of which each may be left out."""
    if what is not None and file is None and what.endswith((".yaml", ".yml")):
        file, what = Path(what), None
    if what is not None and model is not None:
        raise PipelineInvalid(f"the model is given twice: {what} and --model {model}")
    return model or what, file or Path("pipeline.yaml")


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
    """`module:callable`."""
    target: Target = "onnx"
    goal: Goal = "both"
    task: str | None = None
    """What the model is for, where neither it nor the data shows that."""


def prompt_for_missing(options: InitOptions, ask: Ask) -> InitOptions:
    """Return the options with missing ones prompted for; if they name a model, only its inputs.

    `ask` is called with the question, the default, and a check that raises on a wrong answer.
    """
    if options.model is None:
        model = ask("Model, as a folder, file, timm:NAME or module:callable", "", check_model)
        asks = options.checkpoint is None and not has_weights(model)
        checkpoint = ask("Checkpoint", NO_ANSWER, str) if asks else options.checkpoint
        data = options.data or ask(
            "Data, as module:callable", NO_ANSWER, lambda d: d == NO_ANSWER or parse_reference(d)
        )
        target: Any = ask("Format: onnx, torchscript or aot", options.target, _one_of(Target))
        goal: Any = ask("Goal: smaller, faster or both", options.goal, _one_of(Goal))
        options = replace(
            options,
            model=model,
            checkpoint=None if checkpoint == NO_ANSWER else checkpoint,
            data=None if data == NO_ANSWER else data,
            target=target,
            goal=goal,
        )
    if options.data is None and not options.inputs and not declares_inputs(str(options.model)):
        answer = ask(
            "Inputs, each as name=batch,3,224,224", "", lambda text: parse_inputs(text.split())
        )
        options = replace(options, inputs=answer.split())
    return options


def check_model(text: str) -> str:
    """Check that a text has one of the forms of a model, and return it."""
    path = Path(text.partition(".py:")[0] + ".py" if ".py:" in text else text)
    if text.startswith(TIMM_PREFIX) or path.exists() or REFERENCE.match(text):
        return text
    raise PipelineInvalid(
        f"--model {text!r}: there is no such file or folder here, and it is not one of: "
        f"{MODEL_FORMS}"
    )


def has_weights(model: str) -> bool:
    """Whether a model is a folder or a file that holds its weights."""
    return Path(model).is_dir() or Path(model).suffix in EXPORTED_ENDINGS


def declares_inputs(model: str) -> bool:
    """Whether a model itself shows its inputs: not a factory, and not TorchScript."""
    known = model.startswith(TIMM_PREFIX) or has_weights(model)
    return known and Path(model).suffix not in TORCHSCRIPT_ENDINGS


def parse_reference(text: str, option: str = "") -> str:
    """Check that a text has the form `module:callable`, and return it."""
    try:
        return TypeAdapter(Reference).validate_python(text)
    except ValidationError:
        raise PipelineInvalid(
            f"{option}{text!r} is not of the form module:callable, such as my_model:classifier"
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
    """Parse input tensors, each `name=batch,3,224,224` or `name=batch,length:int64`."""
    inputs = []
    for each in text:
        name, _, rest = each.partition("=")
        sizes, _, dtype = rest.partition(":")
        shape = [int(s) if s.isdecimal() else s for s in sizes.replace(" ", "").split(",")]
        content = {"name": name, "shape": shape, "dtype": dtype or "float32"}
        try:
            inputs.append(dump_input(TensorSpec.model_validate(content)))
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise PipelineInvalid(
                f"--input {each!r}: {problem}; expected name=batch,3,224,224 or "
                "name=batch,length:int64"
            ) from None
    return inputs


def dump_input(spec: TensorSpec) -> dict[str, Any]:
    """Return an input's settings without defaults, as one writes them in the file."""
    return spec.model_dump(mode="json", exclude_defaults=True)


def _one_of(known: Any) -> Callable[[str], None]:
    def check(text: str) -> None:
        if text not in get_args(known):
            raise PipelineInvalid(f"{text!r} is not one of {', '.join(get_args(known))}")

    return check


def model_section(options: InitOptions, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the `model:` section for what was given, and the folder of its code, if it has any.

    Paths are given relative to the working directory, and written relative to the file's `folder`.
    """
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
    elif path.suffix in EXPORTED_ENDINGS:
        model = {"file": relative_path(folder, path)}
    elif text.endswith(".py") or ".py:" in text:
        file, _, name = text.partition(":")
        code = Path(file).parent
        model = {"factory": _reference_in(Path(file), name)}
    elif REFERENCE.match(text):
        module = text.partition(":")[0].partition(".")[0]
        # The file's folder is the default of `code:`; name this one where only it has the module.
        code = next(
            (f for f in (folder, Path()) if (f / f"{module}.py").exists() or (f / module).is_dir()),
            None,
        )
        model = {"factory": text}
    else:
        raise PipelineInvalid(f"--model {text!r} is not one of: {MODEL_FORMS}")
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
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in arguments
    ]
    if missing:
        given = " ".join(f"--argument {name}=…" for name in missing)
        raise PipelineInvalid(
            f"--model: {reference} takes {', '.join(missing)}, without a default; give {given}"
        )
