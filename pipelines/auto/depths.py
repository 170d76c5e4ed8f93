"""How many blocks a search removes: models of a few depths, each with widths of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from compress.artifacts.recipe import KeepBlocks
from compress.common.atomic_files import write_atomically
from compress.pruning.depth import block_search
from compress.pruning.depth.output_error import OutputErrorMeter
from compress.pruning.recovery.removed_blocks import name_before
from compress.pruning.width_harms import WidthSpace, measure_harms

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from compress.artifacts.eager_model import EagerModel
    from compress.pruning.width_harms import Harms
    from pipelines.auto.judge import Judge

BLOCKS = "blocks.json"
"""In the results' folder: the order in which blocks are removed."""
ORDER_SHARE = 0.1
"""Share of the search's time for that order."""
COMPARED_ON = 64
"""Samples on which the outputs of a model without a block are compared."""


@dataclass(frozen=True)
class Depth:
    """A model without some blocks, and the widths that it may have."""

    removed_blocks: tuple[str, ...]
    model: EagerModel
    space: WidthSpace

    @classmethod
    def of_model(cls, judge: Judge, model: EagerModel, removed_blocks: tuple[str, ...]) -> Self:
        """Lay a grid of widths for a model that lacks some blocks.

        Raises:
            PipelineInvalid: a pattern of `space.widths` matches no module.
            StageFailed: the model cannot be traced, or there are no samples to rank channels by.
        """
        space, context = judge.settings.without_blocks(removed_blocks).space, judge.context
        widths = space.widths
        if widths is None:
            return cls(removed_blocks, model, WidthSpace.empty(context.device))
        chosen = widths.model_dump(exclude={"calibration_samples"})
        return cls(removed_blocks, model, WidthSpace.of_model(model, context, **chosen))

    @property
    def smallest(self) -> dict[str, int]:
        """The smallest width of each group."""
        return {group: widths[-1] for group, widths in self.space.grid.items()}

    def measure_harms(
        self, judge: Judge, deadline: float, deeper: Mapping[str, Mapping[int, float]] | None = None
    ) -> Harms:
        """Measure what each single cut loses beyond the blocks; what is known already is read.

        Args:
            judge: the model before the search, and its data.
            deadline: on the clock of :func:`time.monotonic`.
            deeper: what cuts lose in the model with all blocks, as is assumed of a group until one
                of its widths is measured.
        """
        removed = len(self.removed_blocks)
        file = judge.out / (f"harms-{removed}-blocks-removed.json" if removed else "harms.json")
        key = f"{self.model.digest} {judge.settings.space.widths}"
        try:
            content = json.loads(file.read_bytes())
            known = content["harms"] if content["key"] == key else {}
        except (OSError, ValueError, KeyError, TypeError):
            known = {}
        without_blocks = judge.loss_of(self.model.load()) if removed else 0.0
        return measure_harms(
            self.space,
            judge.context.progress,
            lambda module: max(0.0, judge.loss_of(module) - without_blocks),
            known,
            lambda: write_atomically(file, json.dumps({"key": key, "harms": known}, indent=1)),
            deadline,
            {g: deeper[name] for g, name in self.names_before.items() if deeper and name in deeper},
        )

    @property
    def names_before(self) -> dict[str, str]:
        """Names that groups have in the model with all blocks."""
        removal = self.model.recipe.edits[-1] if self.removed_blocks else None
        kept = removal.kept if isinstance(removal, KeepBlocks) else {}
        return {group: name_before(group, kept) for group in self.space.grid}


def depths_to_try(judge: Judge, deadline: float) -> list[tuple[str, ...]]:
    """Return the blocks that are removed in each depth but the model's own, the fewest first.

    Blocks leave one after another, each time the one whose removal changes the outputs least. They
    are 1, 2, 4 and so on: widths lie between, and each depth takes time.

    Args:
        judge: the model and its data.
        deadline: on the clock of :func:`time.monotonic`; no further block is searched after it.
    """
    order = _known_order(judge.out / BLOCKS, judge.model.digest)
    if order is None:
        order = _measured_order(judge, deadline)
        content = {"model": judge.model.digest, "removed": order}
        write_atomically(judge.out / BLOCKS, json.dumps(content, indent=1))
    counts = [2**power for power in range(len(order).bit_length())]
    return [tuple(order[:count]) for count in counts]


def _known_order(file: Path, model: str) -> list[str] | None:
    try:
        content = json.loads(file.read_bytes())
        return [*map(str, content["removed"])] if content["model"] == model else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measured_order(judge: Judge, deadline: float) -> list[str]:
    model = judge.model
    module, inputs = model.load(), model.signature.example(seed=judge.context.seed)
    blocks = block_search.all_blocks(module)
    refused = block_search.reasons_to_stay(module, inputs, blocks)
    free = [block for block in blocks if block.name not in refused]
    half = replace(judge.context, data=judge.decided_on.data)
    meter = OutputErrorMeter(module, model.signature, half, "outputs", COMPARED_ON)
    progress = judge.context.progress
    removal = block_search.search(module, free, None, meter, refused, progress, deadline)
    if not removal.steps:
        reasons = [f"{name}: {reason}" for name, reason in removal.refused.items()]
        why = reasons[0] if reasons else "no list or sequence holds two modules of one class"
        judge.options.announce(f"warning: auto.space.blocks: no block can be removed ({why})")
    return [block.name for block, _ in removal.steps]
