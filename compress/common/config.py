"""Base class and field types of all settings: frozen pydantic models without unknown keys."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import PydanticCustomError, core_schema

from compress.common.errors import CompressError, PipelineInvalid

LONGEST_SHOWN = 100  # characters of a value in `repr`: a report has 14,000


class Unmet(NamedTuple):
    """What keeps a stage or a gate from doing its work, known before anything runs."""

    setting: tuple[str, ...]
    """Path of the setting that is wrong, or that needs what is missing; empty for none."""
    problem: str
    """What was found, what was expected, and how to mend it."""
    error: type[CompressError] = PipelineInvalid
    is_program: bool = False
    """Whether it is a program, which may be installed before its stage begins."""


class Settings(BaseModel):
    """An immutable group of settings; every field's docstring becomes its text in the schema."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # A command validates few of the classes that it imports, and building one takes long.
        defer_build=True,
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        # pydantic takes true as 1, and 1 and "no" as booleans.
        schema: core_schema.CoreSchema = _keep_booleans_apart(handler(source), cls)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(schema)
        settings = handler.resolve_ref_schema(found).get("properties", {})
        for name, text in descriptions(cls).items():
            if name in settings:
                settings[name].setdefault("description", text)
        return found

    def unmet_by(self, context: Any) -> Iterator[Unmet]:
        """Yield what these settings need and a run's data or machine have not.

        ``context`` is a `Context`, whose data are None as long as they are not loaded. Nested
        settings are asked too, and libraries and programs are `requirements`.
        """
        yield from ()

    def nested(self) -> Iterator[tuple[tuple[str, ...], Settings]]:
        """Yield these settings and all within them, each after its path."""
        yield (), self
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Settings):
                for path, inner in value.nested():
                    yield (name, *path), inner

    def refuse_settings_of_others(
        self, choice: str, takers_of: Mapping[str, tuple[str, ...]]
    ) -> None:
        """Raise ValueError for a setting beside its default that another's value does not take.

        ``takers_of`` maps the setting's name to the values of ``choice`` that it is for.
        """
        chosen = getattr(self, choice)
        for name, takers in takers_of.items():
            if chosen not in takers and not self.has_default(name):
                raise ValueError(f"{name} is for {choice}: {', '.join(takers)}, found {chosen}")

    def has_default(self, name: str) -> bool:
        """Return whether a setting has its default, which a dump holds as if it were written."""
        return bool(getattr(self, name) == type(self).model_fields[name].default)


def descriptions(settings: type[Settings]) -> dict[str, str]:
    """Return what is said of settings by their names: `Field`'s description, or the docstring.

    Docstrings are read from the sources of classes. pydantic's `use_attribute_docstrings` would
    read them wherever a class is imported, which took most of the time of an import, and more than
    a second beside torch.
    """
    found: dict[str, str] = {}
    for base in reversed(settings.__mro__):
        if issubclass(base, Settings):
            texts = _attribute_docstrings(_source(base.__module__)).get(base.__qualname__, {})
            own = inspect.get_annotations(base)
            found = {n: text for n, text in found.items() if n not in own} | texts
    said = {name: one.description or found.get(name) for name, one in settings.model_fields.items()}
    return {name: text for name, text in said.items() if text}


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (LookupError, OSError, TypeError):
        return ""  # of a notebook's cell


@functools.lru_cache(maxsize=64)
def _attribute_docstrings(source: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of annotated attributes, by class and name."""
    found: dict[str, dict[str, str]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ClassDef):
                found[prefix + part.name] = dict(_documented(part))
                visit(part, f"{prefix}{part.name}.")
            elif isinstance(part, ast.FunctionDef):
                visit(part, f"{prefix}{part.name}.<locals>.")

    visit(ast.parse(source), "")
    return found


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for one, after in pairwise(node.body):
        match one, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, inspect.cleandoc(text)


class Result(Settings):
    """Results, whose `repr` shows no field at length; that of settings tells runs apart."""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the fields that `repr` shows: those beside their default, none at length."""
        for name, value in super().__repr_args__():
            if name is None or not self.has_default(name):
                is_long = len(repr(value)) > LONGEST_SHOWN
                yield name, f"<{type(value).__name__}>" if is_long else value


PARTS_OF_SCHEMAS = ("schema", "fields", "choices", "items_schema", "keys_schema", "values_schema")
"""Keys of pydantic's core schemas that hold others."""


def _keep_booleans_apart(part: Any, settings: type[Settings]) -> Any:
    """Return settings' core schema where only true and false are booleans, and neither a number."""
    if isinstance(part, list | tuple):
        return type(part)(_keep_booleans_apart(each, settings) for each in part)
    # Nested settings have done so themselves.
    if not isinstance(part, dict) or part.get("cls", settings) is not settings:
        return part
    kind = part.get("type")
    if kind == "bool":
        return {**part, "strict": True}
    if kind in ("int", "float"):
        return core_schema.no_info_before_validator_function(_refuse_boolean, part)
    if part.get("function", {}) == {"type": "no-info", "function": _refuse_boolean}:
        return part  # the schema of a class that is complete comes here again
    # Choices of a tagged union and fields of a model are mappings by name.
    inner = part if kind is None else {key: part[key] for key in PARTS_OF_SCHEMAS if key in part}
    return part | {key: _keep_booleans_apart(each, settings) for key, each in inner.items()}


def _refuse_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number")
    return value


Ratio = Annotated[float, Field(gt=0, lt=1)]  # a fraction strictly between 0 and 1
Fraction = Annotated[float, Field(ge=0, le=1)]  # a fraction from 0 to 1, both included
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # a finite number above 0
Count = Annotated[int, Field(gt=0)]  # a whole number from 1
LONGEST_NAME = 200
"""Bytes of a folder's name; file systems take 255, and temporary names have a suffix."""


def check_length(name: str) -> str:
    """Return a name; raise ValueError where it is too long for a folder's."""
    size = len(name.encode())  # letters beyond ASCII have several bytes
    if size > LONGEST_NAME:
        raise ValueError(
            f"the name {name[:16]!r}… is too long: it has {size} bytes, expected at most "
            f"{LONGEST_NAME}, as folders are named so"
        )
    return name


StageName = Annotated[
    str,
    # maxLength in the schema counts letters, which are never more than the bytes.
    Field(pattern=r"^[A-Za-z0-9][\w.=-]*$", json_schema_extra={"maxLength": LONGEST_NAME}),
    AfterValidator(check_length),
]
"""Name of a stage and of its folders."""


def first_problem(error: ValidationError) -> str:
    """Return what is wrong with the first of the values, in a validator's own words."""
    return error.errors()[0]["msg"].removeprefix("Value error, ")
