"""How many blocks a search removes: models of a few depths, each with widths of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from compress.artifacts.recipe import KeepBlocks
from compress.common.sealed_json import read_state, write_state
from compress.pipelines.auto.candidates import candidate_of
from compress.pipelines.auto.front import missed_limits
from compress.pruning.depth import block_search
from compress.pruning.depth.output_error import OutputErrorMeter
from compress.pruning.latency.solver import Programme
from compress.pruning.latency.widths import WidthSpace, measure_loss_increases
from compress.pruning.recovery.recovery import name_before

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.artifacts.eager_model import EagerModel
    from compress.pipelines.auto.candidate_evaluator import Judge
    from compress.pipelines.auto.candidates import Candidate, CheckedModel
    from compress.pipelines.auto.strategy.recovery import Programmes
    from compress.pipelines.config.auto_settings import AutoSettings
    from compress.pruning.latency.widths import LossIncreases

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
        grid = WidthSpace.from_model(model, context, widths.selection, widths.values)
        return cls(removed_blocks, model, grid)

    @property
    def smallest(self) -> dict[str, int]:
        """The smallest width of each group."""
        return {group: widths[-1] for group, widths in self.space.grid.items()}

    def measure_harms(
        self, judge: Judge, deadline: float, deeper: Mapping[str, Mapping[int, float]] | None = None
    ) -> LossIncreases:
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
        known = read_state(file, key, dict[str, float]) or {}
        without_blocks = judge.loss_of(self.model.load()) if removed else 0.0
        return measure_loss_increases(
            self.space,
            judge.context.progress,
            lambda module: max(0.0, judge.loss_of(module) - without_blocks),
            known,
            lambda: write_state(file, key, known),
            deadline,
            {g: deeper[name] for g, name in self.names_before.items() if deeper and name in deeper},
        )

    @property
    def names_before(self) -> dict[str, str]:
        """Names that groups have in the model with all blocks."""
        removal = self.model.recipe.edits[-1] if self.removed_blocks else None
        kept = removal.kept if isinstance(removal, KeepBlocks) else {}
        return {group: name_before(group, kept) for group in self.space.grid}


class Searching(Protocol):
    """What this module uses of `Search`, whose module imports this one."""

    judge: Judge
    settings: AutoSettings
    checked: dict[str, CheckedModel]

    def check(self, candidate: Candidate, predicted_ms: float | None = None) -> None:
        """Check a candidate, unless that was done."""

    def check_whole(self, deadline: float, removed_blocks: tuple[str, ...] = ()) -> None:
        """Check a model of whole widths in each format and runtime."""

    def measure_kernels(self, depth: Depth, deadline: float | None = None) -> None:
        """Measure kernels over the grid of widths, in each format and runtime."""

    def offered(self) -> list[CheckedModel]:
        """Return the checked models of the formats, runtimes and depths that are asked for."""


@dataclass
class Depths:
    """The models of a search with fewer and fewer blocks."""

    search: Searching
    whole: Depth
    """The model with all blocks."""
    shallower: list[tuple[str, ...]] = field(default_factory=list)
    """Blocks that may be removed, the fewest first, each time with those before."""
    added: list[Depth] = field(default_factory=list)
    """Models whose widths are decided."""

    def __post_init__(self) -> None:
        self.added.append(self.whole)

    def find_order(self, deadline: float) -> None:
        """Find in which order blocks may be removed, within some of the time until a deadline."""
        until = time.monotonic() + ORDER_SHARE * self.search.settings.time
        self.shallower = depths_to_try(self.search.judge, min(deadline, until))

    def add(self, deadline: float) -> None:
        """Prepare widths without some blocks, and without more of them, where that may do."""
        for removed_blocks in self.shallower:
            if time.monotonic() > deadline:
                break
            depth = self._checked_whole(removed_blocks, deadline)
            # Where fewer channels lose even more, unless training returns it.
            limits, recovery = self.search.settings.limits, self.search.settings.space.recovery
            whole = whole_models_of(self.search.offered(), depth) if depth else []
            is_kept = any("max_drop" not in missed_limits(limits, model) for model in whole)
            if depth is not None and (is_kept or recovery):
                self.search.measure_kernels(depth, deadline)
                self.added.append(depth)

    def programmes(self, deadline: float) -> Programmes:
        """Measure what single cuts lose at each depth, in equal shares of the time until then."""
        programmes: dict[tuple[str, ...], Programme] = {}
        for done, depth in enumerate(self.added):
            now = time.monotonic()
            until = now + (deadline - now) / (len(self.added) - done)
            deeper = programmes[()].loss_increase if programmes else None
            harms = depth.measure_harms(self.search.judge, until, deeper)
            programmes[depth.removed_blocks] = Programme(depth.space.grid, harms)
        return programmes

    def are_feasible(self, deadline: float) -> bool:
        """Check the smallest model with all blocks, and, if need be, with the fewest.

        Returns:
            Whether one of them meets all limits but that of the drop.
        """
        if self._is_feasible(self.whole):
            return True
        fewest = self._checked_whole(self.shallower[-1], deadline) if self.shallower else None
        return fewest is not None and self._is_feasible(fewest)

    def _is_feasible(self, depth: Depth) -> bool:
        limits = self.search.settings.limits
        if limits.latency is None and limits.size is None and limits.memory is None:
            return True
        whole = whole_models_of(self.search.offered(), depth)
        for model in sorted(whole, key=lambda model: model.latency_ms):
            candidate = candidate_of(
                *(model.format, depth.smallest, depth.space.whole, model.runtime),
                depth.removed_blocks,
            )
            self.search.check(candidate)
            found = self.search.checked.get(candidate.name)
            if found is None or not missed_limits(limits, found, but="max_drop"):
                return True
        return False

    def _checked_whole(self, removed_blocks: tuple[str, ...], deadline: float) -> Depth | None:
        """Check the model without some blocks as wide as before; None where it cannot be made."""
        self.search.check_whole(deadline, removed_blocks)
        judge = self.search.judge
        for model in self.search.offered():
            if model.removed_blocks == removed_blocks:
                pruned = judge.pruned_model(model.candidate)
                return Depth.of_model(judge, pruned, removed_blocks)
        return None


def whole_models_of(checked: Sequence[CheckedModel], depth: Depth) -> list[CheckedModel]:
    """Return the checked models of a depth that are as wide as before, and not trained."""
    return [
        model
        for model in checked
        if model.removed_blocks == depth.removed_blocks
        and not (model.widths or model.float_layers or model.trained)
    ]


def depths_to_try(judge: Judge, deadline: float) -> list[tuple[str, ...]]:
    """Return the blocks that are removed in each depth but the model's own, the fewest first.

    Blocks leave one after another, each time the one whose removal changes the outputs least. They
    are 1, 2, 4 and so on: widths lie between, and each depth takes time.

    Args:
        judge: the model and its data.
        deadline: on the clock of :func:`time.monotonic`; no further block is searched after it.
    """
    file, key = judge.out / BLOCKS, judge.model.digest
    order = read_state(file, key, list[str])
    if order is None:
        order = _measured_order(judge, deadline)
        write_state(file, key, order)
    counts = [2**power for power in range(len(order).bit_length())]
    return [tuple(order[:count]) for count in counts]


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
