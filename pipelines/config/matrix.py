"""Branches from one stage of a pipeline file: `matrix: {ratio: [0.3, 0.5]}`.

The stage, and what follows it, is repeated for each value. A file's content is expanded before it
is validated, so that a branch is a stage like any other.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.config import short
from compress.common.errors import PipelineInvalid
from pipelines.config.model_spec import SOURCE
from pipelines.config.registry import stages
from pipelines.config.validation_errors import did_you_mean
from pipelines.config.yaml_source import Origin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.core.stage import Stage
    from pipelines.config.yaml_source import Location, Source

MATRIX = "matrix"
FIXED = ("stage", "name", "input", "gates", MATRIX)
"""Keys of a stage that no matrix varies."""
MOST_BRANCHES = 64
"""Of one stage."""
LONGEST_VALUE = 32
"""Characters of a value in a name."""
NOT_IN_NAMES = re.compile(r"[^\w.=-]+")


class Branch(NamedTuple):
    """One of the stages that a stage of the file has become."""

    name: str
    suffix: str
    choices: frozenset[tuple[int, int]]
    """Index in the file and number of the combination, for each matrix on the road to it."""


class Choice(NamedTuple):
    """One combination of a matrix."""

    values: dict[str, Any]
    numbers: dict[str, int]
    suffix: str


def expanded(source: Source) -> Source:
    """Return a pipeline file with its branches in the place of each stage that has a matrix.

    Raises:
        PipelineInvalid: a matrix is none, has too many branches, or one is not told from another.
    """
    written = source.content.get("stages")
    if not isinstance(written, list) or not any(_has_matrix(stage) for stage in written):
        return source
    expansion = _Expansion(source)
    found = [pair for i, stage in enumerate(written) for pair in expansion.branches(i, stage)]
    return replace(
        source,
        content={**source.content, "stages": [stage for stage, _ in found]},
        origins=tuple(origin for _, origin in found),
        unexpanded=source.content,
    )


def refuse_twins(branches: Sequence[Stage[Any, Any]], source: Source) -> None:
    """Refuse a matrix of which two branches are the same, however their values are written.

    Raises:
        PipelineInvalid: there are such.
    """
    seen: dict[str, str] = {}
    for i, origin in enumerate(source.origins if source.unexpanded else ()):
        stage = branches[i]
        key = _json([origin.index, stage.input, stage.own_settings()])
        if origin.chosen and key in seen:
            raise PipelineInvalid(
                f"{source.describe(('stages', i))}: {seen[key]} and {stage.title} have the same "
                "settings; leave one value out of the matrix"
            )
        seen[key] = stage.title


def allow_matrix_(definition: dict[str, Any], name: str) -> None:
    """Let the JSON Schema of a stage take a matrix too, in place."""
    varied = [key for key in definition["properties"] if key not in FIXED]
    lists = {
        key: {
            "type": "array",
            "minItems": 1,
            "items": {"$ref": f"#/$defs/{name}/properties/{key}"},
        }
        for key in varied
    }
    definition["properties"][MATRIX] = {
        "type": "object",
        "description": "Values of settings to try: each combination is a branch of its own.",
        "properties": lists,
        "additionalProperties": False,
        "minProperties": 1,
    }
    for key in [key for key in definition.get("required", ()) if key in varied]:
        definition["required"].remove(key)
        in_matrix = {"required": [MATRIX], "properties": {MATRIX: {"required": [key]}}}
        either = {"anyOf": [{"required": [key]}, in_matrix]}
        definition.setdefault("allOf", []).append(either)


def _has_matrix(stage: Any) -> bool:
    return isinstance(stage, dict) and MATRIX in stage


class _Expansion:
    """The stages of a file so far, each with its branches."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.known: dict[str, list[Branch]] = {}
        """By the name that the file gives a stage."""
        self.previous = SOURCE

    def branches(self, index: int, stage: Any) -> Iterator[tuple[Any, Origin]]:
        """Yield what a stage of the file becomes, each with where it comes from."""
        if not isinstance(stage, dict):  # validation says so
            yield stage, Origin(index, {})
            return
        title, roads = str(stage.get("name") or stage.get("stage")), self._roads(stage)
        combinations = [Choice({}, {}, "")]
        if MATRIX in stage:
            combinations = list(self._combinations(index, stage))
        if len(roads) * len(combinations) > MOST_BRANCHES:
            raise self._refusal(
                ("stages", index),
                f"has {len(roads) * len(combinations)} branches, expected at most {MOST_BRANCHES}",
            )
        found: list[Branch] = []
        for road, (number, choice) in product(roads, enumerate(combinations)):
            suffix = road.suffix + choice.suffix
            chosen = {(index, number)} if choice.suffix else set()
            branch = Branch(title + suffix, suffix, road.choices | chosen)
            found.append(branch)
            yield self._stage(index, stage, road, branch, choice), Origin(index, choice.numbers)
        self.known[title], self.previous = found, title

    def _roads(self, stage: dict[str, Any]) -> list[Branch]:
        """Return the branches that a stage reads; one that is named alone is not repeated."""
        name = stage.get("input") or self.previous
        if isinstance(name, str) and name in self.known:
            return self.known[name]
        every = (branch for found in self.known.values() for branch in found)
        choices = next((b.choices for b in every if b.name == name), frozenset())
        return [Branch(name, "", choices)]

    def _stage(
        self, index: int, stage: dict[str, Any], road: Branch, branch: Branch, choice: Choice
    ) -> dict[str, Any]:
        here: Location = ("stages", index)
        written = {key: value for key, value in stage.items() if key != MATRIX}
        written |= choice.values
        if branch.suffix:
            written["name"] = self._checked(index, branch.name)
        written["input"] = road.name
        if isinstance(written.get("teacher"), str):
            teacher = self._same_branch(written["teacher"], branch, (*here, "teacher"))
            written["teacher"] = teacher
        if isinstance(written.get("gates"), list):
            written["gates"] = [
                self._gate(gate, branch, (*here, "gates", i, "against"))
                for i, gate in enumerate(written["gates"])
            ]
        return written

    def _gate(self, gate: Any, branch: Branch, place: Location) -> Any:
        if not isinstance(gate, dict) or not isinstance(gate.get("against"), str):
            return gate
        return {**gate, "against": self._same_branch(gate["against"], branch, place)}

    def _same_branch(self, name: str, branch: Branch, place: Location) -> str:
        """Return the branch of a stage on whose road another one lies."""
        found = self.known.get(name, [])
        ours = [other.name for other in found if other.choices <= branch.choices]
        if found and not ours:
            names = ", ".join(other.name for other in found)
            raise self._refusal(place, f"{name!r} is several branches; name one of {names}")
        return ours[0] if ours else name

    def _combinations(self, index: int, stage: dict[str, Any]) -> Iterator[Choice]:
        place: Location = ("stages", index, MATRIX)
        matrix = stage[MATRIX]
        if not isinstance(matrix, dict) or not matrix:
            raise self._refusal(place, f"expected settings with lists of values, found {matrix!r}")
        for key, values in matrix.items():
            self._check(stage, key, values, (*place, key))
        names = [_names(values) for values in matrix.values()]
        for numbers in product(*(range(len(values)) for values in matrix.values())):
            chosen = dict(zip(matrix, numbers, strict=True))
            told = zip(matrix, names, numbers, strict=True)
            yield Choice(
                {key: matrix[key][number] for key, number in chosen.items()},
                chosen,
                "".join(f"-{key}={name[number]}" for key, name, number in told),
            )

    def _check(self, stage: dict[str, Any], key: str, values: Any, place: Location) -> None:
        if key in FIXED:
            raise self._refusal(place, "is no setting to vary; write a stage for each")
        kind = stages().get(str(stage.get("stage")))
        if kind is not None and key not in kind.model_fields:
            known = {*kind.model_fields} - {*FIXED}
            raise self._refusal(place, f"unknown key; {did_you_mean(key, known)}")
        if key in stage:
            raise self._refusal(place, f"the stage has {key!r} beside its matrix too; keep one")
        if not isinstance(values, list):
            raise self._refusal(place, f"expected a list of values, found {values!r}")
        if not values:
            raise self._refusal(place, "is empty; expected at least one value")
        written = [_json(value) for value in values]
        for i, value in enumerate(values):
            if written[i] in written[:i]:
                raise self._refusal((*place, i), f"{value!r} stands there twice; keep one")

    def _checked(self, index: int, name: str) -> str:
        try:
            return short(name)
        except ValueError as error:
            mend = "give the stage a shorter one with `name:`"
            raise self._refusal(("stages", index), f"{error}; {mend}") from None

    def _refusal(self, place: Location, message: str) -> PipelineInvalid:
        return PipelineInvalid(f"{self.source.describe(place)}: {message}")


def _names(values: list[Any]) -> list[str]:
    """Return what tells the values of a setting apart in names: themselves, or their numbers."""
    names = []
    for value in values:
        text = value if isinstance(value, str) else _json(value)
        text = text.replace(":", "=").replace('"', "").replace(",", "-")
        names.append(NOT_IN_NAMES.sub("_", text.strip("{}[]")))
    if len(set(names)) < len(names) or not all(0 < len(n) <= LONGEST_VALUE for n in names):
        return [str(number) for number in range(1, len(names) + 1)]
    return names


def _json(value: Any) -> str:
    """Return a value as text, the same for equal ones; YAML has dates, which JSON has not."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
