"""The stage that removes whole blocks."""

from __future__ import annotations

import logging
from math import floor
from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import KeepBlocks
from compress.common.config import Count, Ratio
from compress.common.errors import StageFailed
from compress.core.stage import Stage
from compress.pruning.finetune import AnyFinetune

if TYPE_CHECKING:
    import torch
    from pydantic import JsonValue

    from compress.checkpoint.state_dict import Weights
    from compress.core.context import Context
    from compress.core.loss import Loss
    from compress.pruning.depth.block_search import Block, Removal

log = logging.getLogger(__name__)


class PruneLayers(Stage[EagerModel, EagerModel]):
    """Remove whole blocks, such as transformer layers or residual blocks, by measured harm.

    Each removal is tried on the model itself, and the block that is missed least leaves; then the
    next one is looked for among those that are left. A block whose output does not fit in for its
    input stays, with the reason among the facts.
    """

    stage: Literal["prune_layers"] = "prune_layers"
    remove: Count | None = None
    """Blocks to remove; or give `keep` or `ratio`."""
    keep: Count | None = None
    """Blocks to keep, of all."""
    ratio: Ratio | None = None
    """Fraction of all blocks to remove, rounded down."""
    exclude: tuple[str, ...] = ()
    """Names of blocks, or of modules around them, that stay; `*` matches any characters."""
    judged_by: Literal["metric", "outputs"] | None = None
    """What harm is: how much worse the `metric` on `val` is, or how far the `outputs` lie from
    those before; by default the metric where `val` has targets. Without data the outputs on seeded
    inputs are compared."""
    samples: Count = 512
    """Samples of `val` that each removal is judged on, at most."""
    finetune: AnyFinetune | None = None
    """How the smaller model is trained; it stays as it was cut unless an epoch is better."""

    @model_validator(mode="after")
    def _one_says_how_many(self) -> Self:
        given = [name for name in ("remove", "keep", "ratio") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give one of remove, keep and ratio, found {found}")
        return self

    @property
    def needs_data(self) -> bool:
        """Whether there is fine-tuning to do, or a metric to measure."""
        return self.finetune is not None or self.judged_by == "metric"

    @property
    def uses_loss(self) -> bool:
        """Whether fine-tuning minimizes the loss on targets."""
        return self.finetune is not None and self.finetune.uses_targets

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss."""
        if self.finetune is not None:
            self.finetune.check_loss(loss)

    @property
    def uses_data(self) -> bool:
        """Always: removals are judged on it."""
        return True

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Search, cut, and fine-tune.

        Raises:
            PipelineInvalid: a pattern of ``exclude`` matches no module.
            StageFailed: the model has no repeated blocks or fewer that can be removed, or there is
                no data for what is asked.
        """
        if self.needs_data:
            context.need_data(f"{self.title} with finetune or judged_by: metric")
        edit, facts = self._search(model, context)
        module = model.load()
        edit.apply_(module)
        weights: torch.nn.Module | Weights = module
        if self.finetune is not None:
            from compress.pruning.finetune import finetune

            start = model.derive(context.work / "cut", module, edits=[edit])
            fitted = finetune(start, model, self.finetune, context, self.title)
            weights, facts = fitted.weights, facts | fitted.facts()
        lineage = self.lineage(model)
        return model.derive(context.root, weights, edits=[edit], lineage=lineage, facts=facts)

    def _search(
        self, model: EagerModel, context: Context
    ) -> tuple[KeepBlocks, dict[str, JsonValue]]:
        from compress.pruning.allocation.ranking import modules_excluded
        from compress.pruning.depth.block_search import (
            all_blocks,
            kept_without,
            reasons_to_stay,
            search,
        )
        from compress.pruning.depth.output_error import OutputErrorMeter

        module = model.load()
        blocks = all_blocks(module)
        excluded = modules_excluded(module, self.exclude, "prune_layers.exclude")
        refused = {
            b.name: f"excluded by {excluded[b.name]!r}" for b in blocks if b.name in excluded
        }
        inputs = model.signature.example(seed=context.seed)
        refused |= reasons_to_stay(module, inputs, [b for b in blocks if b.name not in refused])
        free = [block for block in blocks if block.name not in refused]
        count = self._count(blocks, len(free))
        judge = OutputErrorMeter(module, model.signature, context, self.judged_by, self.samples)
        try:
            removal = search(module, free, count, judge, refused, context.progress)
        except StageFailed as error:
            raise StageFailed(f"{self.title}: {error}") from None
        removed = [block for block, _ in removal.steps]
        log.info("%s: without %s", self.title, ", ".join(block.name for block in removed))
        kept = kept_without(module, removed)
        return KeepBlocks(kept=kept), _facts(removal, judge.judged_by, kept)

    def _count(self, blocks: list[Block], free: int) -> int:
        """Return how many blocks are to be removed.

        Raises:
            StageFailed: that is none.
        """
        if not blocks:
            raise StageFailed(
                f"{self.title}: the model has no repeated blocks: no list or sequence holds two "
                "modules of one class that have parts of their own"
            )
        if self.remove is not None:
            return self.remove
        asked = f"keep: {self.keep}" if self.keep else f"ratio: {self.ratio:g}"
        count = len(blocks) - self.keep if self.keep else floor((self.ratio or 0) * len(blocks))
        if count < 1:
            raise StageFailed(
                f"{self.title}: {asked} of {len(blocks)} blocks removes none; "
                f"{free} of them can be removed"
            )
        return count


def _facts(
    removal: Removal, judged_by: str, kept: dict[str, tuple[int, ...]]
) -> dict[str, JsonValue]:
    """Return the harm of each block, what left, and what could not and why."""
    return {
        "judged_by": judged_by,
        "harm_alone": {block.name: dict(harm.facts()) for block, harm in removal.alone.items()},
        "removed": [{"block": block.name, **harm.facts()} for block, harm in removal.steps],
        "kept": {container: list(indices) for container, indices in kept.items()},
        "stayed": dict(removal.refused),
    }
