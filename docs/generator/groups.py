"""Groups of settings, such as `parallel`: each is shown once, on the first page that needs it."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from setting_text import definitions, joined, prose

from compress.training.config.training import Training
from pipelines.config.pipeline import json_schema
from pipelines.config.registry import OURS, stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.core.stage import Stage

    AnyStage = type[Stage[Any, Any]]

STATIONS = {
    "training": ("Train", "compress.training", "../training.md"),
    "pruning": ("Prune", "compress.pruning", "../pruning.md"),
    "distillation": ("Distil", "compress.distillation", "../pruning.md#distillation"),
    "quantization": ("Quantize", "compress.quantization", "../quantization.md"),
    "export": ("Export", "export", "../export.md"),
    "packaging": ("Package", "serve", "../serving.md"),
}
"""Page → its title, the package whose stages it shows, and the guide."""
SCHEMA = json_schema()
DEFS: dict[str, Any] = SCHEMA["$defs"]
OF_THE_FILE: dict[str, Any] = {}
"""What every stage may have in a file, though it is no setting of its class."""
TRAIN: dict[str, Any] = {name: DEFS["Train"]["properties"][name] for name in Training.model_fields}
"""The settings of `train` that every training has, by their names."""


def stages_of(page: str) -> list[AnyStage]:
    """Return the stages that a page shows."""
    package = STATIONS[page][1]
    return [stage for stage in OURS if stage.__module__.startswith(f"{package}.")]


@cache
def homes() -> dict[str, str]:
    """Return the page of each group, by its class's name."""
    found = dict.fromkeys(_groups_in(SCHEMA["properties"]), "pipeline")
    for page in STATIONS:
        for stage in stages_of(page):
            for group in _groups_in(DEFS[stage.__name__]["properties"]):
                found.setdefault(group, page)
    return found


def group_sections(page: str) -> list[str]:
    """Return the sections of the groups that are at home on a page."""
    return [
        part for group, home in homes().items() if home == page for part in _section(page, group)
    ]


def link_from(page: str) -> Callable[[list[str]], str]:
    """Return what links to groups of settings from a page of the reference."""

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
    home = homes()[group]
    return f"[{_words(group)}]({'' if home == page else f'{home}.md'}#{_anchor(group)})"


def _section(page: str, group: str) -> Iterator[str]:
    schema = DEFS[group]
    own = schema["properties"]
    if _is_a_training(group):
        own = {name: schema for name, schema in own.items() if TRAIN.get(name) != schema}
    words = _words(group)
    yield f"### {words[0].upper()}{words[1:]} {{#{_anchor(group)}}}"
    yield prose(schema.get("description", ""))
    yield definitions(own, schema.get("required", ()), _anchor(group), link_from(page))
    if _is_a_training(group):
        yield "And every setting of [`train`](training.md#train)."


def _is_a_training(group: str) -> bool:
    return TRAIN.keys() <= DEFS[group]["properties"].keys()


def _groups_in(properties: dict[str, Any]) -> Iterator[str]:
    """Yield the groups that settings are made of, and those within them, each once."""
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
        schema = [told for name, told in schema.items() if name != "discriminator"]
    if isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _words(group: str) -> str:
    """Return a group's name: `kl` for a term of a loss, otherwise its class's in words."""
    term = DEFS[group]["properties"].get("loss", {}).get("const")
    words = term or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", group).lower()
    return words.replace("hugging face", "Hugging Face").replace("onnx", "ONNX")


def _anchor(group: str) -> str:
    return f"group-{_words(group).replace(' ', '-').lower()}"


def _complete_() -> None:
    """Take what is no setting from the stages; describe settings by their groups' descriptions."""
    for stage in stages().values():
        properties = DEFS[stage.__name__]["properties"]
        for name in properties.keys() - stage.model_fields.keys():
            told = properties.pop(name)
            OF_THE_FILE[name] = {"type": told["type"], "description": told["description"]}
    for told in DEFS.values():  # pydantic leaves out what the group says in the same words
        for setting in told.get("properties", {}).values():
            if "$ref" in setting:
                group = DEFS[setting["$ref"].rpartition("/")[2]]
                setting.setdefault("description", group.get("description"))


_STAGES = {stage.__name__ for stage in stages().values()}
_GATES = {name for name, told in DEFS.items() if "gate" in told.get("properties", {})}
_complete_()
