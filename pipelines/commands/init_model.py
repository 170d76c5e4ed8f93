"""What `compress init` takes as a model: a folder, a file, a name of timm, or a factory."""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, PipelineInvalid
from compress.common.factories import REFERENCE, resolve
from compress.pipelines.commands import init_options

if TYPE_CHECKING:
    from compress.pipelines.commands.init_options import InitOptions


def model_section(options: InitOptions, folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return the `model:` section for what was given, and the folder of its code, if it has any.

    Args:
        options: the model, as a path relative to the working directory or as a name, and what else
            was given of it.
        folder: the folder of the pipeline file, which paths in the file are relative to.

    Raises:
        PipelineInvalid: it is none of the forms, or an option does not go with it.
    """
    text = init_options.check_model(str(options.model))
    path, code = Path(text), None
    arguments = init_options.parse_arguments(options.arguments)
    if text.startswith(init_options.TIMM):
        model: dict[str, Any] = {"timm": text.removeprefix(init_options.TIMM)}
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise PipelineInvalid(
                f"--model: {text} is a folder without config.json; give {init_options.FORMS}"
            )
        model = {"huggingface": relative_path(folder, path)}
    elif path.suffix in init_options.EXPORTED:
        model = {"file": relative_path(folder, path)}
    elif text.endswith(".py") or ".py:" in text:
        file, _, name = text.partition(":")
        code = Path(file).parent
        model = {"factory": _reference_in(Path(file), name)}
    elif REFERENCE.match(text):
        module = text.partition(":")[0].partition(".")[0]
        # The file's folder is the default of `code:`; name this one where only it has the module.
        code = next((f for f in (folder, Path()) if _has_module(f, module)), None)
        model = {"factory": text}
    else:
        raise PipelineInvalid(f"--model {text!r} is not one of: {init_options.FORMS}")
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


def _has_module(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


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
        return init_options.parse_reference(f"{file.stem}:{name}", "--model ")
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
