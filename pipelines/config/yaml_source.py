"""Reads `pipeline.yaml` safely, refuses duplicate keys, and keeps the line of each key."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from compress.common.atomic_files import read_regular
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.core.validation_errors import Location, dotted, has_part
from compress.pipelines.system.yaml_core import MERGE, PREFIX, Loader

LARGEST_BYTES = 2**20
"""Of a file: PyYAML reads about 500 kB a second, and no sensible file has more."""
DEEPEST = 30  # levels of nesting that no sensible file reaches
LARGEST = 100_000
"""Values of a file, aliases expanded; aliases of aliases ("billion laughs") grow far beyond it."""
LONGEST_KEY = 200  # characters of a key
STRING = f"{PREFIX}str"
PLAIN = tuple(PREFIX + kind for kind in ("str", "float", "int", "null", "bool", "seq", "map"))
UNPRINTED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and halves of characters, which YAML can write as escapes."""


@dataclass(frozen=True)
class Origin:
    """The place of an expanded stage in the file."""

    index: int
    chosen: dict[str, int]
    """Setting of its matrix → number of the value that it has here."""


@dataclass(frozen=True)
class Source:
    """A pipeline file's content and the line of each key."""

    path: Path
    content: dict[str, Any]
    lines: dict[Location, int] = field(repr=False)
    origins: tuple[Origin, ...] = ()
    """For each stage of the content its place in the file; empty where no matrix was expanded."""
    unexpanded: dict[str, Any] | None = None
    """The content before matrices were expanded; None where there are none."""

    def written(self, location: Location) -> Location:
        """Return the location in the file of a location in the expanded content."""
        if not self.origins or location[:1] != ("stages",) or len(location) < 2:
            return location
        origin, rest = self.origins[int(location[1])], location[2:]
        if rest and rest[0] in origin.chosen:
            rest = ("matrix", rest[0], origin.chosen[str(rest[0])], *rest[1:])
        return ("stages", origin.index, *rest)

    def name_of(self, index: int) -> str:
        """Return the name that a stage has in the file, without its branch."""
        stage = (self.unexpanded or self.content)["stages"][self.written(("stages", index))[1]]
        return str(stage.get("name") or stage["stage"])

    def place(self, location: Location = ()) -> str:
        """Return ``file:line`` of the deepest known part of a location."""
        location = self.written(location)
        for end in range(len(location), -1, -1):
            if location[:end] in self.lines:
                return f"{self.path}:{self.lines[location[:end]]}"
        return str(self.path)

    def describe(self, location: Location) -> str:
        """Return the place and the name of a setting, with the kinds of its stage and gate."""
        text = ""
        content: Any = self.unexpanded or self.content
        for part in self.written(location):
            content = content[part] if has_part(content, part) else None
            if isinstance(part, int):
                keys = content if isinstance(content, dict) else {}
                label = keys.get("stage") or keys.get("gate")
                text += f"[{part}]" + (f" ({label})" if label else "")
            else:
                text += f".{part}" if text else part
        return f"{self.place(location)}: {text or 'the file'}"


def read(path: Path) -> Source:
    """Read a file; PipelineInvalid where it is missing, no YAML mapping, or has a key twice."""
    lines: dict[Location, int] = {}
    try:
        loader = Loader(read_regular(path, LARGEST_BYTES).decode())
        root = loader.get_single_node()
        # Before the content is built, which would take aliases of aliases as they come.
        if root is not None:
            _collect_lines(root, (), lines, path, loader)
        content = None if root is None else loader.construct_document(root)
    except ArtifactInvalid as error:
        raise PipelineInvalid(str(error)) from None
    except OSError as error:
        raise PipelineInvalid(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise PipelineInvalid(f"{path}: not a text file; expected YAML") from None
    # PyYAML reads nested lists and mappings by recursion.
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


def _invalid_scalar_reason(node: yaml.ScalarNode, loader: Loader) -> str:
    """Return why a scalar is refused; empty if it is not."""
    if node.tag == STRING:
        odd = UNPRINTED.search(node.value)
        return f"holds the character {odd[0]!r}, expected text" if odd else ""
    try:
        value = loader.construct_object(node)
    except (ValueError, KeyError, IndexError):  # of more than 4300 digits, or an explicit tag
        kind = node.tag.rpartition(":")[2]
        return f"cannot be read as {kind}: {_short(node.value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"expected a finite number, found {_short(node.value)}"
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"expected an integer of 64 bits, found {_short(node.value)}"
    return ""


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}… ({len(text)} characters)"


def _collect_lines(
    node: yaml.Node, here: Location, lines: dict[Location, int], path: Path, loader: Loader
) -> None:
    where = f"{path}:{node.start_mark.line + 1}"
    lines.setdefault(here, node.start_mark.line + 1)
    if len(lines) > LARGEST:
        raise PipelineInvalid(f"{where}: more than {LARGEST} values, with what aliases mean")
    if len(here) > DEEPEST:
        mend = "an alias must not contain itself"
        raise PipelineInvalid(f"{where}: nested deeper than {DEEPEST} levels; {mend}")
    if node.tag not in PLAIN:
        raise PipelineInvalid(
            f"{where}: {dotted(here)}: has the YAML tag {node.tag!r}, expected text, a number, a "
            "list, or keys and values without a tag"
        )
    if isinstance(node, yaml.ScalarNode) and (refusal := _invalid_scalar_reason(node, loader)):
        raise PipelineInvalid(f"{where}: {dotted(here)}: {refusal}")
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _collect_lines(child, (*here, index), lines, path, loader)
    elif isinstance(node, yaml.MappingNode):
        _merge_(node, path)
        for key_node, child in node.value:
            where = f"{path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise PipelineInvalid(f"{where}: a key is a list or a mapping, expected text")
            key, location = _short(repr(key_node.value)), (*here, key_node.value)
            if key_node.tag != STRING:
                raise PipelineInvalid(f"{where}: key {key} is not a word; put it in quotes")
            if len(key_node.value) > LONGEST_KEY:
                found = f"{len(key_node.value)} characters, expected at most {LONGEST_KEY}"
                raise PipelineInvalid(f"{where}: a key has {found}")
            if refusal := _invalid_scalar_reason(key_node, loader):
                raise PipelineInvalid(f"{where}: a key {refusal}")
            lines[location] = key_node.start_mark.line + 1
            _collect_lines(child, location, lines, path, loader)


def _merge_(node: yaml.MappingNode, path: Path) -> None:
    """Refuse keys that stand twice; replace `<<: *other` by what the other has and this one not."""
    own: dict[str, Any] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in own:  # PyYAML would take the last one
            first = own[name][0].start_mark.line + 1
            mend = "; write one, `<<: [*a, *b]`" if key.tag == MERGE else ""
            raise PipelineInvalid(
                f"{path}:{line}: key {_short(repr(name))} stands twice; first on line {first}{mend}"
            )
        own[name] = (key, value)
    merge = next((name for name, (key, _) in own.items() if key.tag == MERGE), None)
    if merge is None:
        return
    key, value = own.pop(merge)
    where = f"{path}:{key.start_mark.line + 1}"
    # Set now: a mapping that merges itself ends here.
    node.value = [*own.values()]
    merged: dict[str, Any] = {}
    pairs = 0
    for other in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        if not isinstance(other, yaml.MappingNode):
            raise PipelineInvalid(
                f"{where}: '<<' adds the keys of other mappings, found {_short(str(other.value))}; "
                "write an alias, `<<: *name`, of an anchor `&name` before keys and values"
            )
        _merge_(other, path)
        pairs += len(other.value)
        if pairs > LARGEST:
            raise PipelineInvalid(f"{where}: '<<' adds more than {LARGEST} values")
        for pair in other.value:
            merged.setdefault(str(pair[0].value), pair)
    node.value = [pair for name, pair in merged.items() if name not in own] + node.value
