"""Students: a model of another factory, or the input with some of its blocks."""

from __future__ import annotations

import itertools
import logging
import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, field_validator

from compress.artifacts.recipe import KeepBlocks
from compress.common.config import Count, Settings
from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch
    from pydantic import JsonValue

    from compress.artifacts.eager_model import EagerModel

    Distance = Callable[[torch.nn.Module], float]

LARGEST_SEARCH = 300
"""Choices of blocks that are all measured; of more, blocks are taken out one by one."""
SHOWN = 5

log = logging.getLogger(__name__)


class SomeBlocks(Settings):
    """The input with some of its blocks, such as a transformer's layers."""

    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | Count
    """Blocks that stay, counted from 0; or how many: those are searched with which the model,
    before any training, answers most nearly as its teacher."""
    blocks: str | None = None
    """Name of the list of blocks; by default the one with the most."""

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, ...] | int) -> tuple[int, ...] | int:
        if isinstance(layers, tuple) and list(layers) != sorted(set(layers)):
            raise ValueError(f"layers ascend, each once, found {list(layers)}")
        return layers

    def container(self, module: torch.nn.Module) -> tuple[str, int]:
        """Return the name of the list of blocks, and how many it has.

        Raises:
            StageFailed: there is none, or not the one that is named, or it has no such blocks.
        """
        from compress.artifacts.edits.block_removal import blocks_of

        known = blocks_of(module)
        if not known or (self.blocks is not None and self.blocks not in known):
            names = ", ".join(map(repr, known)) or "none"
            raise StageFailed(
                f"student.blocks: the model has no list of blocks{_named(self.blocks)}; "
                f"those there are: {names}"
            )
        name = self.blocks or max(known, key=lambda container: known[container])
        asked = max(self.layers) + 1 if isinstance(self.layers, tuple) else self.layers
        if asked > known[name]:
            raise StageFailed(
                f"student.layers: {name!r} has {known[name]} blocks, found {self.layers}"
            )
        return name, known[name]

    def cut(
        self, model: EagerModel, path: Path, distance: Callable[[], Distance]
    ) -> tuple[EagerModel, dict[str, JsonValue]]:
        """Return a model with some of its blocks, sealed at a path, and how they were chosen.

        Args:
            model: the whole model.
            path: directory of the artifact.
            distance: returns what measures how far a module is from the teacher.
        """
        module = model.load()
        name, count = self.container(module)
        facts: dict[str, JsonValue] = {}
        kept = self.layers
        if isinstance(kept, int):
            kept, facts = measured_choice(model, name, count, kept, distance())
        edit = KeepBlocks(kept={name: kept})
        edit.apply_(module)
        log.info("blocks %s of %d in %s stay", list(kept), count, name)
        cut = model.derive(path, module, edits=[edit])
        return cut, {"blocks": {"in": name, "kept": list(kept), "of": count, **facts}}


def _named(name: str | None) -> str:
    return f" named {name!r}" if name else ""


def measured_choice(
    model: EagerModel,
    container: str,
    count: int,
    keep: int,
    distance: Distance,
) -> tuple[tuple[int, ...], dict[str, JsonValue]]:
    """Return the blocks with which a model is nearest to its teacher, and the nearest choices.

    All choices are measured where they are few, else the least harmful block is taken out again and
    again.

    Args:
        model: the model that is cut.
        container: its list of blocks.
        count: how many there are.
        keep: how many stay.
        distance: how far a module is from the teacher.
    """
    known: dict[tuple[int, ...], float] = {}

    def measure(kept: tuple[int, ...]) -> float:
        module = model.load()
        KeepBlocks(kept={container: kept}).apply_(module)
        known[kept] = distance(module)
        log.info("blocks %s: %.4g from the teacher", list(kept), known[kept])
        return known[kept]

    if math.comb(count, keep) <= LARGEST_SEARCH:
        best = min(itertools.combinations(range(count), keep), key=measure)
    else:
        best = tuple(range(count))
        while len(best) > keep:
            best = min(_without_one(best), key=measure)
    final = {kept: value for kept, value in known.items() if len(kept) == keep}
    nearest = sorted(final, key=lambda kept: final[kept])[:SHOWN]
    facts: dict[str, JsonValue] = {
        "measured": len(known),
        "nearest": [{"kept": list(kept), "distance": final[kept]} for kept in nearest],
    }
    return best, facts


def _without_one(kept: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for place in range(len(kept)):
        yield kept[:place] + kept[place + 1 :]
