"""Students that are made from the input model by removing some of its blocks."""

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
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from pydantic import JsonValue

    from compress.artifacts.eager_model import EagerModel

    Distance = Callable[[torch.nn.Module], float]

LARGEST_SEARCH = 300
"""Up to as many choices of blocks are all measured; of more, blocks are removed one by one."""
REPORTED = 5
"""Best choices that are listed in the artifact's facts."""

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
        """Return the name of the list of blocks, and how many it has: at least those that stay."""
        from compress.artifacts.edits.removal import blocks_of

        known = blocks_of(module)
        if not known or (self.blocks is not None and self.blocks not in known):
            names = ", ".join(map(repr, known)) or "none"
            wanted = f" named {self.blocks!r}" if self.blocks else ""
            raise StageFailed(
                f"student.blocks: the model has no list of blocks{wanted}; those there are: {names}"
            )
        name = self.blocks or max(known, key=lambda container: known[container])
        needed = max(self.layers) + 1 if isinstance(self.layers, tuple) else self.layers
        if needed > known[name]:
            raise StageFailed(
                f"student.layers: {name!r} has {known[name]} blocks, found {self.layers}"
            )
        return name, known[name]

    def cut(
        self, model: EagerModel, path: Path, distance: Callable[[], Distance]
    ) -> tuple[EagerModel, dict[str, JsonValue]]:
        """Write the model with some of its blocks, and return facts about their choice."""
        module = model.load()
        name, count = self.container(module)
        facts: dict[str, JsonValue] = {}
        kept = self.layers
        if isinstance(kept, int):  # only a search needs the distance, for which the teacher runs
            kept, facts = choose_blocks(model, name, count, kept, distance())
        edit = KeepBlocks(kept={name: kept})
        edit.apply_(module)
        log.info("blocks %s of %d in %s stay", list(kept), count, name)
        cut = model.derive(path, module, edits=[edit])
        return cut, {"blocks": {"in": name, "kept": list(kept), "of": count, **facts}}


def choose_blocks(
    model: EagerModel, container: str, count: int, keep: int, distance: Distance
) -> tuple[tuple[int, ...], dict[str, JsonValue]]:
    """Return the blocks with which a model is nearest to its teacher, and facts about the search.

    ``keep`` of the ``count`` blocks in the list ``container`` stay.
    """
    known: dict[tuple[int, ...], float] = {}

    def measure(kept: tuple[int, ...]) -> float:
        module = model.load()  # anew, because the edit removes blocks in place
        KeepBlocks(kept={container: kept}).apply_(module)
        known[kept] = distance(module)
        log.info("blocks %s: %.4g from the teacher", list(kept), known[kept])
        return known[kept]

    # All choices are measured if they are few, else the least harmful block is removed repeatedly.
    if math.comb(count, keep) <= LARGEST_SEARCH:
        best = min(itertools.combinations(range(count), keep), key=measure)
    else:
        best = tuple(range(count))
        while len(best) > keep:
            best = min((best[:i] + best[i + 1 :] for i in range(len(best))), key=measure)
    final = {kept: value for kept, value in known.items() if len(kept) == keep}
    nearest = sorted(final, key=lambda kept: final[kept])[:REPORTED]
    facts: dict[str, JsonValue] = {
        "measured": len(known),
        "nearest": [{"kept": list(kept), "distance": final[kept]} for kept in nearest],
    }
    return best, facts
