"""Groups of settings, such as `parallel`: each is on the first page that uses it."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from setting_text import definitions, joined, prose

from compress.pipelines.config.pipeline import json_schema
from compress.pipelines.config.registry import stages
from compress.training.config.training import Training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.core.stage import Stage

    AnyStage = type[Stage[Any, Any]]

STAGE_PAGES = {
    "training": ("Train", "compress.training", "../training.md"),
    "pruning": ("Prune", "compress.pruning", "../pruning.md"),
    "distillation": ("Distil", "compress.distillation", "../pruning.md#distillation"),
    "quantization": ("Quantize", "compress.quantization", "../quantization.md"),
    "export": ("Export", "compress.export", "../export.md"),
    "packaging": ("Package", "compress.serve", "../serving.md"),
}
"""Page → its title, the package of its stages, and the guide."""
SCHEMA = json_schema()
DEFS: dict[str, Any] = SCHEMA["$defs"]
OF_THE_FILE: dict[str, Any] = {}
"""Keys that every stage may have in a file, and that are no settings of its class."""
TRAIN: dict[str, Any] = {name: DEFS["Train"]["properties"][name] for name in Training.model_fields}
"""Settings shared by every stage that trains, by name."""


def stages_of(page: str) -> dict[str, AnyStage]:
    """Return the stages on a page by name."""
    package = STAGE_PAGES[page][1]
    return {n: stage for n, stage in stages().items() if stage.__module__.startswith(f"{package}.")}


@cache
def group_pages() -> dict[str, str]:
    """Return the page of each group by class name."""
    # `auto` last, as it also refers to groups of the stages that it adds.
    auto = {"auto": SCHEMA["properties"]["auto"]}
    others = {name: key for name, key in SCHEMA["properties"].items() if name not in auto}
    pages = dict.fromkeys(_groups_in(others), "pipeline")
    for page in STAGE_PAGES:
        for stage in stages_of(page).values():
            for group in _groups_in(DEFS[stage.__name__]["properties"]):
                pages.setdefault(group, page)
    for group in _groups_in(auto):
        pages.setdefault(group, "pipeline")
    return pages


def group_sections(page: str) -> list[str]:
    """Return the sections of a page's groups."""
    return [
        part
        for group, its_page in group_pages().items()
        if its_page == page
        for part in _section(page, group)
    ]


def link_from(page: str) -> Callable[[list[str]], str]:
    """Return a function that links to groups of settings from a reference page."""

    def link(groups: list[str]) -> str:
        if set(groups) <= _STAGES:
            return "[stages](stages.md)"
        if set(groups) <= _GATES:
            return "[gates](gates.md)"
        if groups == ["JsonValue"]:
            return "anything"
        return f"group {joined([_link(page, group) for group in groups], 'or')}"

    return link


def _link(page: str, group: str) -> str:
    target = group_pages()[group]
    file = "" if target == page else f"{target}.md"
    return f"[{_words(group)}]({file}#{_anchor(group)})"


def _section(page: str, group: str) -> Iterator[str]:
    schema = DEFS[group]
    own = schema["properties"]
    if _trains(group):
        own = {name: schema for name, schema in own.items() if TRAIN.get(name) != schema}
    words = _words(group)
    yield f'### <a id="{_anchor(group)}"></a>{words[0].upper()}{words[1:]}'
    yield prose(schema.get("description", ""))
    yield definitions(own, schema.get("required", ()), _anchor(group), link_from(page))
    if _trains(group):
        yield "And every setting of [`train`](training.md#train)."


def _trains(group: str) -> bool:
    return TRAIN.keys() <= DEFS[group]["properties"].keys()


def _groups_in(properties: dict[str, Any]) -> Iterator[str]:
    """Yield the groups that settings refer to, nested ones too, each once."""
    waiting, seen = list(_references(properties)), set()
    while waiting:
        group = waiting.pop(0)
        if group in seen or group in _STAGES | _GATES | {"JsonValue"}:
            continue
        seen.add(group)
        yield group
        waiting.extend(_references(DEFS[group]["properties"]))


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        schema = [value for name, value in schema.items() if name != "discriminator"]
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _words(group: str) -> str:
    """Return a group's title: `kl` for a loss term, else its class name in words."""
    term = DEFS[group]["properties"].get("loss", {}).get("const")
    words = term or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", group).lower()
    return words.replace("hugging face", "Hugging Face").replace("onnx", "ONNX")


def _anchor(group: str) -> str:
    return f"group-{_words(group).replace(' ', '-').lower()}"


def _complete_() -> None:
    """Move keys that are no settings to OF_THE_FILE."""
    for stage in stages().values():
        properties = DEFS[stage.__name__]["properties"]
        for name in properties.keys() - stage.model_fields.keys():
            key = properties.pop(name)
            OF_THE_FILE[name] = {"type": key["type"], "description": key["description"]}


_STAGES = {stage.__name__ for stage in stages().values()}
_GATES = {name for name, definition in DEFS.items() if "gate" in definition.get("properties", {})}
_complete_()
