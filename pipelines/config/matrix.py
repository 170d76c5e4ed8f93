"""Expands a stage with `matrix: {ratio: [0.3, 0.5]}` into one branch for each value.

The stage and those that follow it are repeated for each value. A file's content is expanded before
it is validated, so that a branch is a stage like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.config import check_length
from compress.common.errors import PipelineInvalid
from compress.core.validation_errors import Location, did_you_mean
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.config.registry import stages
from compress.pipelines.config.yaml_source import Origin, Source

if TYPE_CHECKING:
    from compress.core.stage import Stage

MATRIX = "matrix"
FIXED = ("stage", "name", "input", "gates", MATRIX)  # keys of a stage that a matrix cannot vary
MOST_BRANCHES = 64  # of one stage
LONGEST_VALUE = 32  # characters of a value in a name
NOT_IN_NAMES = re.compile(r"[^\w.=-]+")


class Branch(NamedTuple):
    """One of the stages that a stage of the file expands to."""

    name: str
    suffix: str
    choices: frozenset[tuple[int, int]]
    """Index in the file and number of the combination, for each matrix of it and its ancestors."""


def expand_matrices(source: Source) -> Source:
    """Replace each stage that has a matrix, and those that follow it, by their branches."""
    written = source.content.get("stages")
    if not isinstance(written, list) or not any(
        isinstance(stage, dict) and MATRIX in stage for stage in written
    ):
        return source
    expansion = _Expansion(source)
    branches = [pair for i, stage in enumerate(written) for pair in expansion.branches(i, stage)]
    contents, origins = zip(*branches, strict=True)
    content = {**source.content, "stages": [*contents]}
    return replace(source, content=content, origins=origins, unexpanded=source.content)


def refuse_duplicate_branches(branches: Sequence[Stage[Any, Any]], source: Source) -> None:
    """Refuse a matrix of which two branches have the same settings, however these are written."""
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
    """Add `matrix` to the JSON Schema of a stage, in place."""
    varied = [key for key in definition["properties"] if key not in FIXED]
    items = {key: {"$ref": f"#/$defs/{name}/properties/{key}"} for key in varied}
    lists = {k: {"type": "array", "minItems": 1, "items": item} for k, item in items.items()}
    definition["properties"][MATRIX] = {
        "type": "object",
        "description": "Values of settings to try: each combination is a branch of its own.",
        "properties": lists,
        "additionalProperties": False,
        "minProperties": 1,
    }
    # A setting that is required may come from the matrix instead.
    for key in [key for key in definition.get("required", ()) if key in varied]:
        definition["required"].remove(key)
        in_matrix = {"required": [MATRIX], "properties": {MATRIX: {"required": [key]}}}
        either = {"anyOf": [{"required": [key]}, in_matrix]}
        definition.setdefault("allOf", []).append(either)


class _Expansion:
    """Expands the stages of a file in their order, and remembers the branches of each."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.known: dict[str, list[Branch]] = {}  # by the name that the file gives a stage
        self.previous = SOURCE

    def branches(self, index: int, stage: Any) -> Iterator[tuple[Any, Origin]]:
        """Yield the content of each branch of a stage, with its place in the file."""
        if not isinstance(stage, dict):  # validation says so
            yield stage, Origin(index, {})
            return
        title, name = str(stage.get("name") or stage.get("stage")), stage.get("input")
        name = name or self.previous
        if isinstance(name, str) and name in self.known:
            inputs = self.known[name]  # all branches of that stage
        else:
            every = (branch for branches in self.known.values() for branch in branches)
            choices = next((b.choices for b in every if b.name == name), frozenset())
            inputs = [Branch(name, "", choices)]
        combinations = list(self._combinations(index, stage)) if MATRIX in stage else [({}, "")]
        count = len(inputs) * len(combinations)
        if count > MOST_BRANCHES:
            problem = f"has {count} branches, expected at most {MOST_BRANCHES}"
            raise self._refusal(("stages", index), problem)
        branches: list[Branch] = []
        for before, (number, (chosen, label)) in product(inputs, enumerate(combinations)):
            suffix = before.suffix + label
            choices = before.choices | ({(index, number)} if label else set())
            branch = Branch(title + suffix, suffix, choices)
            branches.append(branch)
            content = {key: value for key, value in stage.items() if key != MATRIX}
            content |= {key: stage[MATRIX][key][i] for key, i in chosen.items()}
            content["input"] = before.name
            yield self._renamed(index, content, branch), Origin(index, chosen)
        self.known[title], self.previous = branches, title

    def _renamed(self, index: int, written: dict[str, Any], branch: Branch) -> dict[str, Any]:
        """Give a branch its name, and its references those that they have there."""
        place: Location = ("stages", index)
        if branch.suffix:
            try:
                written["name"] = check_length(branch.name)
            except ValueError as error:
                mend = "give the stage a shorter one with `name:`"
                raise self._refusal(place, f"{error}; {mend}") from None
        if isinstance(teacher := written.get("teacher"), str):
            written["teacher"] = self._same_branch(teacher, branch, (*place, "teacher"))
        if isinstance(written.get("gates"), list):
            written["gates"] = [*written["gates"]]
            for i, gate in enumerate(written["gates"]):
                if isinstance(gate, dict) and isinstance(gate.get("against"), str):
                    against = (*place, "gates", i, "against")
                    name = self._same_branch(gate["against"], branch, against)
                    written["gates"][i] = {**gate, "against": name}
        return written

    def _same_branch(self, name: str, branch: Branch, place: Location) -> str:
        """Return the branch of a stage that another branch descends from."""
        branches = self.known.get(name, [])
        ancestors = [b.name for b in branches if b.choices <= branch.choices]
        if branches and not ancestors:
            names = ", ".join(b.name for b in branches)
            raise self._refusal(place, f"{name!r} is several branches; name one of {names}")
        return ancestors[0] if ancestors else name

    def _combinations(
        self, index: int, stage: dict[str, Any]
    ) -> Iterator[tuple[dict[str, int], str]]:
        """Yield the number of one value for each setting, and what it adds to names."""
        place: Location = ("stages", index, MATRIX)
        matrix = stage[MATRIX]
        if not isinstance(matrix, dict) or not matrix:
            raise self._refusal(place, f"expected settings with lists of values, found {matrix!r}")
        for key, values in matrix.items():
            self._check(stage, key, values, (*place, key))
        labels = [_labels(values) for values in matrix.values()]
        for numbers in product(*(range(len(values)) for values in matrix.values())):
            parts = zip(matrix, labels, numbers, strict=True)
            suffix = "".join(f"-{key}={label[number]}" for key, label, number in parts)
            yield dict(zip(matrix, numbers, strict=True)), suffix

    def _check(self, stage: dict[str, Any], key: str, values: Any, place: Location) -> None:
        if key in FIXED:
            raise self._refusal(place, "is not a setting to vary; write a stage for each")
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

    def _refusal(self, place: Location, message: str) -> PipelineInvalid:
        return PipelineInvalid(f"{self.source.describe(place)}: {message}")


def _labels(values: list[Any]) -> list[str]:
    """Return a short label for each value of a setting: the value itself, or its number."""
    labels = []
    for value in values:
        text = value if isinstance(value, str) else _json(value)
        text = text.replace(":", "=").replace('"', "").replace(",", "-")
        labels.append(NOT_IN_NAMES.sub("_", text.strip("{}[]")))
    # Else numbers: a name must be short, and tell the branches apart.
    if len(set(labels)) < len(labels) or not all(0 < len(n) <= LONGEST_VALUE for n in labels):
        return [str(number) for number in range(1, len(labels) + 1)]
    return labels


def _json(value: Any) -> str:
    """Return a value as JSON, the same for equal values; of dates, which JSON lacks, as text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
