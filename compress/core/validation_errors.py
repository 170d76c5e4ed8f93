"""Turns pydantic's validation errors into lines with place, value found, and what is expected."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from compress.common.config import Settings
from compress.common.factories import REFERENCE
from compress.core.gates.gate import AnnouncedGates, gate_classes

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    ErrorPath = tuple[str | int, ...]
    """Keys, indices and members of unions, as pydantic names them."""

Location = tuple[str | int, ...]  # keys and indices that lead to a value

REMOVED = {
    "quantize_native": "stage 'quantize_native' was removed, as torch deprecates the modes of "
    "torch.ao that it used; write 'quantize_static' (method: static), 'quantize_dynamic' (method: "
    "dynamic) or 'quantize_aware_training' (method: qat), whose graphs export_torchscript turns "
    "into torch's own integer kernels",
    "runs_in": "gate 'runs_in' was removed; write {gate: parity, atol: …, on: web}",
}
"""Messages for stages and gates that earlier versions had, with their replacements."""


class _Problem(NamedTuple):
    details: ErrorDetails
    location: Location
    """Place in the file."""
    known: Iterable[str]
    """Keys that are allowed there."""
    members: tuple[ErrorPath, ...]
    """Paths of the members of unions that pydantic tried on its way there."""


def explain(
    error: ValidationError,
    content: Any,
    model: type[Settings],
    describe: Callable[[Location], str],
    written: Callable[[Location], Location] = lambda location: location,
) -> str:
    """Return one line per problem: place, what was found, what was expected.

    `content` was validated as `model`; `describe` names a place in it, and `written` returns where
    the user wrote what is at a place.
    """
    problems = _of_likely_members([_resolve(each, content, model) for each in error.errors()])
    locs = [problem.details["loc"] for problem in problems]
    misspelt = {
        (*loc[:-1], closest(str(loc[-1]), problem.known))
        for loc, problem in zip(locs, problems, strict=True)
        if problem.details["type"] == "extra_forbidden"
    }
    places: dict[Location, list[_Problem]] = {}
    for loc, problem in zip(locs, problems, strict=True):
        kind = problem.details["type"]
        # A misspelt key is missing too; a list whose only item is wrong counts as empty.
        misspelling = kind == "missing" and loc in misspelt
        emptied = kind == "too_short" and any(e[: len(loc)] == loc != e for e in locs)
        if not misspelling and not emptied:
            places.setdefault(written(problem.location), []).append(problem)
    return "\n".join(_line(each, model, describe) for each in places.values())


def dotted(location: Location) -> str:
    """Return a location as a dotted name, such as ``stages[0].epochs``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def has_part(content: Any, part: str | int) -> bool:
    """Whether a mapping has a key, or a sequence an index."""
    if isinstance(content, dict):
        return part in content
    return isinstance(content, list | tuple) and isinstance(part, int) and part < len(content)


def _of_likely_members(problems: list[_Problem]) -> list[_Problem]:
    """Drop problems of those members of a union that a value was hardly meant for.

    Where a value has the form of some members, and only parts of it are wrong, these are the others
    and all but the one with the fewest problems.
    """
    counts = Counter(member for problem in problems for member in problem.members)
    chosen: dict[ErrorPath, ErrorPath] = {}
    for problem in problems:
        for member in problem.members:
            is_part = len(problem.details["loc"]) > len(member)
            if is_part and counts[member] < counts.get(chosen.get(member[:-1], ()), math.inf):
                chosen[member[:-1]] = member
    return [
        problem
        for problem in problems
        if all(chosen.get(member[:-1], member) == member for member in problem.members)
    ]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion, or the known words where none is close."""
    known = sorted(known)
    found = closest(word, known)
    return f"did you mean {found!r}?" if found else f"known: {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like another, or None where none is close."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1)), None)


def _line(
    complaints: Sequence[_Problem], model: type[Settings], describe: Callable[[Location], str]
) -> str:
    """Return the line of one place; each member of a union may complain about the same value."""
    mismatches = ("_type", "_parsing", "literal_error", "int_from_float")
    others = [p for p in complaints if not p.details["type"].endswith(mismatches)]
    details, location, known, _ = (others or complaints)[0]
    where = describe(location)
    kind, found = details["type"], details["input"]
    if not others:
        *most, last = dict.fromkeys(_expected(problem.details) for problem in complaints)
        expected = f"{', '.join(most)} or {last}" if most else last
        return f"{where}: expected {expected}, found {_short(found)}"
    if kind == "extra_forbidden":
        key = str(location[-1])
        if location[0] == "stages" and key in model.model_fields and closest(key, known) is None:
            advice = f"it is set once for all stages, by `{key}:` at the beginning of a line"
            return f"{where}: unknown key; {advice}"
        return f"{where}: unknown key; {did_you_mean(key, known)}"
    if kind == "missing":
        return f"{where}: is required and not there"
    if kind == "union_tag_invalid":
        context = details["ctx"]
        key = context["discriminator"].strip("'")
        if context["tag"] in REMOVED:
            return f"{where}: {REMOVED[context['tag']]}"
        known = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        return f"{where}: unknown {key} {context['tag']!r}; {did_you_mean(context['tag'], known)}"
    if kind == "union_tag_not_found":
        key = details["ctx"]["discriminator"].strip("'")
        return f"{where}: has no key {key!r} saying which one it is"
    if kind == "string_pattern_mismatch" and details["ctx"]["pattern"] == REFERENCE.pattern:
        return f"{where}: expected module:callable, such as models:resnet, found {_short(found)}"
    message = details["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{where}: {message}" + ("" if kind == "value_error" else f", found {_short(found)}")


def _expected(details: ErrorDetails) -> str:
    """Return what a value of another type should be, such as `a valid integer`."""
    if details["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "keys and values"
    message = details["msg"].removeprefix("Input should be ").replace("valid tuple", "list")
    if details["type"] == "literal_error":
        return ", ".join(message.rsplit(" or ", 1))
    return re.sub(r", (unable to|got a) .*", "", message)


def _resolve(details: ErrorDetails, content: Any, model: type[Settings]) -> _Problem:
    """Drop the members of unions that pydantic adds to a location: the file has no such keys."""
    loc = details["loc"]
    location: list[str | int] = []
    members: list[ErrorPath] = []
    owner: type[Settings] | None = model
    candidates: list[type[Settings]] = [model]
    for i, part in enumerate(loc):
        tagged = next((c for c in candidates if part in _tags(c)), None)
        if tagged is not None and not (isinstance(content, dict) and part in content):
            owner, candidates = tagged, [tagged]
            members.append(loc[: i + 1])
            continue
        present = has_part(content, part)
        if not present and not (i == len(loc) - 1 and details["type"] == "missing"):
            members.append(loc[: i + 1])  # such as `bool` or `literal['auto']`
            continue
        location.append(part)
        owner = candidates[0] if candidates else owner
        content = content[part] if present else None
        if isinstance(part, str):
            field = owner.model_fields.get(part) if owner else None
            candidates = list(_settings_in(field.annotation)) if field else []
            if field is not None:
                candidates += [c for m in field.metadata for c in _settings_in(m)]
    known = owner.model_fields if owner else ()
    return _Problem(details, tuple(location), known, tuple(members))


def _tags(model: type[Settings]) -> list[Any]:
    fields = model.model_fields
    keys = ("stage", "gate", "edit")
    return [model.__name__, *(fields[key].default for key in keys if key in fields)]


def _settings_in(annotation: Any) -> Iterable[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    if isinstance(annotation, AnnouncedGates):
        yield from gate_classes().values()
    for argument in get_args(annotation):
        yield from _settings_in(argument)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
