"""How many blocks a search removes: models with fewer and fewer, each with widths of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from compress.common.sealed_json import read_state, write_state
from compress.pipelines.auto.candidates import Candidate
from compress.pipelines.auto.front import missed_limits
from compress.pipelines.auto.search_state import BlockVariant
from compress.pruning.depth import block_search
from compress.pruning.depth.block_search import OutputErrorMeter
from compress.pruning.latency.solver import Programme

if TYPE_CHECKING:
    from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
    from compress.pipelines.auto.search_state import Programmes, SearchState

BLOCKS_FILE = "blocks.json"
"""In the results' folder: the order in which blocks are removed."""
ORDER_SHARE = 0.1
"""Share of the search's time for that order."""
BLOCKS_COMPARED_ON = 64
"""Samples on which the outputs of a model without a block are compared."""


@dataclass
class BlockVariants:
    """The models of a search with fewer and fewer blocks."""

    state: SearchState
    whole: BlockVariant
    """The model with all blocks."""
    shallower: list[tuple[str, ...]] = field(default_factory=list)
    """Blocks that may be removed, the fewest first, each time with those before."""
    added: list[BlockVariant] = field(default_factory=list)
    """Models whose widths are decided."""

    def __post_init__(self) -> None:
        self.added.append(self.whole)

    def find_order(self, deadline: float) -> None:
        """Find in which order blocks may be removed, within some of the time until a deadline.

        Blocks leave one after another, each time the one whose removal changes the outputs least.
        """
        evaluator = self.state.evaluator
        file, key = evaluator.out / BLOCKS_FILE, evaluator.model.digest
        order = read_state(file, key, list[str])
        if order is None:
            until = time.monotonic() + ORDER_SHARE * self.state.settings.time
            order = _measured_order(evaluator, min(deadline, until))
            write_state(file, key, order)
        # 1, 2, 4 and so on of them: widths lie between, and each variant takes time.
        counts = [2**power for power in range(len(order).bit_length())]
        self.shallower = [tuple(order[:count]) for count in counts]

    def add(self, deadline: float) -> None:
        """Prepare widths without some blocks, and without more of them, where that may do."""
        for removed_blocks in self.shallower:
            if time.monotonic() > deadline:
                break
            variant = self._checked_whole(removed_blocks, deadline)
            # Where fewer channels lose even more, unless training returns it.
            limits, recovery = self.state.settings.limits, self.state.settings.space.recovery
            whole = self.state.whole_models(removed_blocks) if variant else []
            is_kept = any("max_drop" not in missed_limits(limits, model) for model in whole)
            if variant is not None and (is_kept or recovery):
                self.state.measure_kernels(variant, deadline)
                self.added.append(variant)

    def programmes(self, deadline: float) -> Programmes:
        """Measure what single cuts lose in each variant, in equal shares of the time until then."""
        programmes: dict[tuple[str, ...], Programme] = {}
        for done, variant in enumerate(self.added):
            now = time.monotonic()
            until = now + (deadline - now) / (len(self.added) - done)
            deeper = programmes[()].loss_increase if programmes else None
            losses = variant.measure_loss_increases(self.state.evaluator, until, deeper)
            programmes[variant.removed_blocks] = Programme(variant.space.grid, losses)
        return programmes

    def are_feasible(self, deadline: float) -> bool:
        """Check the smallest model with all blocks, and, if need be, with the fewest.

        Returns:
            Whether one of them meets all limits but that of the drop.
        """
        limits = self.state.settings.limits
        if limits.latency is None and limits.size is None and limits.memory is None:
            return True
        if self._is_feasible(self.whole):
            return True
        fewest = self._checked_whole(self.shallower[-1], deadline) if self.shallower else None
        return fewest is not None and self._is_feasible(fewest)

    def _is_feasible(self, variant: BlockVariant) -> bool:
        state, limits = self.state, self.state.settings.limits
        smallest = ((group, widths[-1]) for group, widths in variant.space.grid.items())
        cut = tuple(sorted((g, width) for g, width in smallest if width != variant.space.whole[g]))
        removed = variant.removed_blocks
        for model in sorted(state.whole_models(removed), key=lambda model: model.latency_ms):
            candidate = Candidate(model.format, cut, runtime=model.runtime, removed_blocks=removed)
            state.check(candidate)
            found = state.checked.get(candidate.name)
            if found is None or not missed_limits(limits, found, but="max_drop"):
                return True
        return False

    def _checked_whole(
        self, removed_blocks: tuple[str, ...], deadline: float
    ) -> BlockVariant | None:
        """Check the model without some blocks as wide as before; None where it cannot be made."""
        self.state.check_whole(deadline, removed_blocks)
        evaluator = self.state.evaluator
        for model in self.state.offered():
            if model.removed_blocks == removed_blocks:
                pruned = evaluator.pruned_model(model.candidate)
                return BlockVariant.from_model(evaluator, pruned, removed_blocks)
        return None


def _measured_order(evaluator: CandidateEvaluator, deadline: float) -> list[str]:
    model, context = evaluator.model, evaluator.context
    module, inputs = model.load(), model.signature.example(seed=context.seed)
    blocks = block_search.all_blocks(module)
    refused = block_search.reasons_to_stay(module, inputs, blocks)
    free = [block for block in blocks if block.name not in refused]
    half = replace(context, data=evaluator.decided_on.data)
    meter = OutputErrorMeter(module, model.signature, half, "outputs", BLOCKS_COMPARED_ON)
    progress = context.progress
    removal = block_search.search(module, free, None, meter, refused, progress, deadline)
    if not removal.steps:
        reasons = [f"{name}: {reason}" for name, reason in removal.refused.items()]
        why = reasons[0] if reasons else "no list or sequence holds two modules of one class"
        evaluator.options.announce(f"warning: auto.space.blocks: no block can be removed ({why})")
    return [block.name for block, _ in removal.steps]
