"""Options of `compress init`: parsing them, and prompting for missing ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from compress.common.errors import PipelineInvalid
from compress.common.factories import REFERENCE, Reference
from compress.common.signature import TensorSpec
from compress.pipelines.system import yaml_core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Ask = Callable[[str, str, Callable[[str], object]], str]

Target = Literal["onnx", "torchscript", "aot"]
Goal = Literal["smaller", "faster", "both"]
NONE = "none"
TIMM = "timm:"
SCRIPTS = (".ts", ".torchscript", ".pt", ".pth")
EXPORTED = (".onnx", ".pt2", *SCRIPTS)
FORMS = (
    "a Hugging Face folder, timm:resnet18, an .onnx, .pt2 or .ts file, a .py file, or "
    "module:callable"
)


def model_and_file(
    what: str | None, file: Path | None, model: str | None
) -> tuple[str | None, Path]:
    """Return the model and the file to write, of arguments of which each may be left out.

    Raises:
        PipelineInvalid: the model is given twice.
    """
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
        checkpoint = ask("Checkpoint", NONE, str) if asks else options.checkpoint
        data = options.data or ask(
            "Data, as module:callable", NONE, lambda d: d == NONE or parse_reference(d)
        )
        target: Any = ask("Format: onnx, torchscript or aot", options.target, _one_of(Target))
        goal: Any = ask("Goal: smaller, faster or both", options.goal, _one_of(Goal))
        options = replace(
            options,
            model=model,
            checkpoint=None if checkpoint == NONE else checkpoint,
            data=None if data == NONE else data,
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
    if text.startswith(TIMM) or path.exists() or REFERENCE.match(text):
        return text
    raise PipelineInvalid(
        f"--model {text!r}: there is no such file or folder here, and it is not one of: {FORMS}"
    )


def has_weights(model: str) -> bool:
    """Whether a model is a folder or a file that holds its weights."""
    return Path(model).is_dir() or Path(model).suffix in EXPORTED


def declares_inputs(model: str) -> bool:
    """Whether a model itself shows its inputs: not a factory, and not TorchScript."""
    known = model.startswith(TIMM) or has_weights(model)
    return known and Path(model).suffix not in SCRIPTS


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
