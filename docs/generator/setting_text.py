"""Markdown for settings: accepted values, bounds, default and description."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from pydantic import BaseModel

    Link = Callable[[list[str]], str]
    """Class names of accepted groups of settings → Markdown links to them."""

WORDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "`true` or `false`",
    "string": "text",
    "object": "mapping",
}
SHORT = 30
"""Longest regular expression, in characters, that is shown: longer ones are unreadable."""


def definitions(
    properties: dict[str, Any], required: Collection[str], anchor: str, link: Link
) -> str:
    """Return a Markdown list of settings, each with an anchor.

    Args:
        properties: JSON Schema by setting.
        required: names of the required settings, which are listed first.
        anchor: prefix of the anchors.
        link: makes the link to a group of settings.
    """
    ordered = sorted(properties.items(), key=lambda item: item[0] not in required)
    return "\n".join(
        f'- <a id="{anchor}-{name}"></a>`{name}` '
        f'<span class="kind">{kind(schema, name in required, link)}</span><br>\n'
        f"  {prose(schema['description'])}"
        for name, schema in ordered
    )


def kind(schema: dict[str, Any], is_required: bool, link: Link) -> str:
    """Describe the accepted values and the default: `text, by default "cpu"`."""
    values = accepted_values(schema, link)
    if is_required:
        return f"{values}, **required**"
    default = schema.get("default")
    if default in (None, []) or isinstance(default, dict):
        return f"{values}, optional"
    if schema.get("const") == default:
        return values
    return f"{values}, by default {code(default)}"


def accepted_values(schema: dict[str, Any], link: Link) -> str:
    """Describe the values that a JSON Schema accepts."""
    if "$ref" in schema:
        return link([_name(schema)])
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return joined([code(value) for value in schema["enum"]], "or")
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _any_of([one for one in schema[several] if one != {"type": "null"}], link)
    if schema.get("type") == "array":
        return _list(schema, link)
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        values = accepted_values(schema["additionalProperties"], link)
        return "mapping" if values == "anything" else f"mapping of names to {values}"
    if "type" not in schema:
        return "anything"
    return WORDS[schema["type"]] + _bounds(schema)


def _any_of(schemas: list[dict[str, Any]], link: Link) -> str:
    plain = [accepted_values(one, link) for one in schemas if "$ref" not in one]
    groups = [_name(one) for one in schemas if "$ref" in one]
    return joined([*plain, link(groups)] if groups else plain, "or")


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"].rpartition("/")[2])


def _list(schema: dict[str, Any], link: Link) -> str:
    if "prefixItems" in schema:
        return f"list of {_and([accepted_values(item, link) for item in schema['prefixItems']])}"
    several = f"list of {_plural(accepted_values(schema['items'], link))}"
    return f"non-empty {several}" if schema.get("minItems") else several


def _plural(words: str) -> str:
    return re.sub(r"^(whole number|number|text|group)\b", r"\1s", words)


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if schema["type"] == "integer" and above is not None:
        low, above = above + 1, None
    if low is not None and high is not None:
        return f" from {low} to {high}"
    parts = {"from": low, "above": above, "below": below, "to": high}
    limits = [f" {word} {value}" for word, value in parts.items() if value is not None]
    pattern = schema.get("pattern", "")
    return " and".join(limits) + (f" like `{pattern}`" if 0 < len(pattern) <= SHORT else "")


def _and(parts: list[str]) -> str:
    return f"{len(parts)} {_plural(parts[0])}" if len(set(parts)) == 1 else joined(parts, "and")


def joined(parts: list[str], word: str) -> str:
    """Join words into a list: `a, b or c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def code(value: Any) -> str:
    """Format a value as it is written in a pipeline file."""
    if isinstance(value, str) and value:
        return f"`{value}`"
    if isinstance(value, list):  # such as gates, without their unset settings
        value = [_given(part) for part in value]
    flow = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return f"`{flow.removesuffix('...' + chr(10)).strip()}`"


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: part for name, part in value.items() if part is not None}
    return value


def prose(text: str) -> str:
    """Convert a docstring to Markdown, with `*`, `_` and `<` escaped outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.replace("``", "`").split()))
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_])", r"\\\1", part).replace("<", "&lt;")
        for part in parts
    )


def paragraphs(cls: type[BaseModel]) -> Iterator[str]:
    """Yield the paragraphs of a class's docstring as Markdown."""
    for paragraph in inspect.cleandoc(cls.__doc__ or "").split("\n\n"):
        is_example = paragraph.startswith("    ")
        yield f"```yaml\n{textwrap.dedent(paragraph)}\n```" if is_example else prose(paragraph)
