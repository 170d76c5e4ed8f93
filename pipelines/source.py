"""Reading pipeline.yaml: safely, no duplicate keys, and remembering where everything stood."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from compress.core.errors import PipelineInvalid

if TYPE_CHECKING:
    from pathlib import Path

Location = tuple[str | int, ...]
DEEPEST = 30
"""Levels of nesting that no sensible file reaches."""
LARGEST = 100_000
"""Values that no sensible file holds."""


@dataclass(frozen=True)
class Origin:
    """Where the file has a stage."""

    index: int
    chosen: dict[str, int]
    """Which value of its matrix each setting has."""


@dataclass(frozen=True)
class Source:
    """A pipeline file's content and the line of each key."""

    path: Path
    content: dict[str, Any]
    lines: dict[Location, int] = field(repr=False)
    origins: tuple[Origin, ...] = ()
    """For each stage of the content where the file has it; empty where they are the same."""
    unexpanded: dict[str, Any] | None = None
    """The content as the file has it, where that is another."""

    def written(self, location: Location) -> Location:
        """Return where the file has a place of the content."""
        if not self.origins or location[:1] != ("stages",) or len(location) < 2:
            return location
        origin, rest = self.origins[int(location[1])], location[2:]
        if rest and rest[0] in origin.chosen:
            rest = ("matrix", rest[0], origin.chosen[str(rest[0])], *rest[1:])
        return ("stages", origin.index, *rest)

    def name_of(self, index: int) -> str:
        """Return the name that the file gives a stage of the content."""
        stage = (self.unexpanded or self.content)["stages"][self.written(("stages", index))[1]]
        return str(stage.get("name") or stage["stage"])

    def place(self, location: Location = ()) -> str:
        """Return ``file:line`` of the deepest known part of a location."""
        location = self.written(location)
        for end in range(len(location), -1, -1):
            if location[:end] in self.lines:
                return f"{self.path}:{self.lines[location[:end]]}"
        return str(self.path)

    def told(self, location: Location) -> str:
        """Return the place of a setting and its name, with what its stage and gate are."""
        text = ""
        content: Any = self.unexpanded or self.content
        for part in self.written(location):
            content = content[part] if _has(content, part) else None
            if isinstance(part, int):
                keys = content if isinstance(content, dict) else {}
                label = keys.get("stage") or keys.get("gate")
                text += f"[{part}]" + (f" ({label})" if label else "")
            else:
                text += f".{part}" if text else part
        return f"{self.place(location)}: {text or 'the file'}"


def _has(content: Any, part: str | int) -> bool:
    if isinstance(content, dict):
        return part in content
    return isinstance(content, list) and isinstance(part, int) and part < len(content)


def read(path: Path) -> Source:
    """Read a pipeline file.

    Raises:
        PipelineInvalid: it is missing, not YAML, not a mapping, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PipelineInvalid(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PipelineInvalid(f"{path}: not a text file; expected YAML") from None
    lines: dict[Location, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _walk(root, (), lines, path)
        content = yaml.safe_load(text)
    except RecursionError:
        raise PipelineInvalid(f"{path}: nested deeper than {DEEPEST} levels") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PipelineInvalid(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise PipelineInvalid(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise PipelineInvalid(
            f"{path}: expected keys `version`, `model` and `stages`, found {found}"
        )
    return Source(path, content, lines)


def _walk(node: yaml.Node, here: Location, lines: dict[Location, int], path: Path) -> None:
    lines.setdefault(here, node.start_mark.line + 1)
    if len(lines) > LARGEST:
        raise PipelineInvalid(
            f"{path}:{node.start_mark.line + 1}: more than {LARGEST} values, with what aliases mean"
        )
    if len(here) > DEEPEST:
        raise PipelineInvalid(
            f"{path}:{node.start_mark.line + 1}: nested deeper than {DEEPEST} levels; an alias "
            "must not contain itself"
        )
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _walk(child, (*here, index), lines, path)
    elif isinstance(node, yaml.MappingNode):
        for key_node, child in node.value:
            location = (*here, str(key_node.value))
            line = key_node.start_mark.line + 1
            if key_node.tag != "tag:yaml.org,2002:str":
                raise PipelineInvalid(
                    f"{path}:{line}: key {key_node.value!r} is not a word; put it in quotes"
                )
            if location in lines:
                raise PipelineInvalid(
                    f"{path}:{line}: key {key_node.value!r} stands twice; "
                    f"first on line {lines[location]}"
                )
            lines[location] = line
            _walk(child, location, lines, path)
