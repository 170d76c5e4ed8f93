"""Turns pydantic's validation errors into lines with place, value found, and what is expected."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, get_args

from compress.common.config import Settings
from compress.core.gates import AddedGates, added_gates
from pipelines.config.yaml_source import has_part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

    from pipelines.config.yaml_source import Location, Source


REMOVED_STAGES = {
    "quantize_native": "stage 'quantize_native' was removed, as torch deprecates the modes of "
    "torch.ao that it used; write 'quantize_static' (method: static), 'quantize_dynamic' (method: "
    "dynamic) or 'quantize_aware_training' (method: qat), whose graphs export_torchscript turns "
    "into torch's own integer kernels",
}
"""Messages for stages that earlier versions had, with their replacements."""


def explain(error: ValidationError, source: Source, model: type[Settings]) -> str:
    """Return one line per problem: place, what was found, what was expected."""
    found, lines = error.errors(), []
    misspelt = {
        (*e["loc"][:-1], closest(str(e["loc"][-1]), _known(e["loc"], source, model)))
        for e in found
        if e["type"] == "extra_forbidden"
    }
    places: set[Location] = set()
    for details in found:
        loc = details["loc"]
        place = source.written(_resolve(loc, source.content, model)[0])
        # A misspelt key is missing too; a list whose only item is wrong counts as empty; every
        # member of a union complains about the same value.
        misspelling = details["type"] == "missing" and loc in misspelt
        emptied = details["type"] == "too_short" and any(
            len(e["loc"]) > len(loc) and e["loc"][: len(loc)] == loc for e in found
        )
        if not misspelling and not emptied and place not in places:
            places.add(place)
            lines.append(_line(details, source, model))
    return "\n".join(lines)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion, or the known words where none is close."""
    known = sorted(known)
    found = closest(word, known)
    return f"did you mean {found!r}?" if found else f"known: {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like another, or None where none is close."""
    return next(iter(difflib.get_close_matches(word, sorted(known), n=1)), None)


def _line(details: ErrorDetails, source: Source, model: type[Settings]) -> str:
    location, _ = _resolve(details["loc"], source.content, model)
    where = source.describe(location)
    kind, found = details["type"], details["input"]
    if kind == "extra_forbidden":
        known = _known(details["loc"], source, model)
        return f"{where}: unknown key; {did_you_mean(str(location[-1]), known)}"
    if kind == "missing":
        return f"{where}: is required and not there"
    if kind == "union_tag_invalid":
        context = details["ctx"]
        key = context["discriminator"].strip("'")
        known = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        if context["tag"] in REMOVED_STAGES:
            return f"{where}: {REMOVED_STAGES[context['tag']]}"
        return f"{where}: unknown {key} {context['tag']!r}; {did_you_mean(context['tag'], known)}"
    if kind == "union_tag_not_found":
        key = details["ctx"]["discriminator"].strip("'")
        return f"{where}: has no key {key!r} saying which one it is"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}: expected keys and values, found {_short(found)}"
    message = details["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{where}: {message}" + ("" if kind == "value_error" else f", found {_short(found)}")


def _known(loc: tuple[str | int, ...], source: Source, model: type[Settings]) -> Iterable[str]:
    """Return the keys that are allowed in the place of an unknown one."""
    _, owner = _resolve(loc, source.content, model)
    return owner.model_fields if owner else ()


def _resolve(
    loc: tuple[str | int, ...], content: Any, model: type[Settings]
) -> tuple[Location, type[Settings] | None]:
    """Drop the union tags that pydantic adds to a location, and find the settings class there."""
    location: list[str | int] = []
    owner: type[Settings] | None = model
    candidates: list[type[Settings]] = [model]
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        # The location names the member of a union that pydantic tried; the file has no such key.
        tagged = next((c for c in candidates if part in (c.__name__, *_keys_that_choose(c))), None)
        if tagged is not None and not (isinstance(content, dict) and part in content):
            owner, candidates = tagged, [tagged]
            continue
        present = has_part(content, part)
        if not present and not last:
            continue
        location.append(part)
        owner = candidates[0] if candidates else owner
        content = content[part] if present else None
        if isinstance(part, str):
            field = owner.model_fields.get(part) if owner else None
            candidates = list(_settings_in(field.annotation)) if field else []
            if field is not None:
                candidates += [c for m in field.metadata for c in _settings_in(m)]
    return tuple(location), owner


def _keys_that_choose(model: type[Settings]) -> list[Any]:
    fields = model.model_fields
    return [fields[key].default for key in ("stage", "gate", "edit") if key in fields]


def _settings_in(annotation: Any) -> Iterable[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    if isinstance(annotation, AddedGates):
        yield from added_gates().values()
    for argument in get_args(annotation):
        yield from _settings_in(argument)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
