"""The stage `prune_layers`: remove whole blocks."""

from __future__ import annotations

import logging
from math import floor
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from compress.artifacts.recipe import KeepBlocks
from compress.common.config import Count, Ratio
from compress.common.errors import StageFailed, located
from compress.core.stage import CalibrationSamples
from compress.pruning.pruning_stage import AnyFinetune, PruningStage, finetune

if TYPE_CHECKING:
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.checkpoint.state_dict import Weights
    from compress.core.context import Context
    from compress.pruning.depth.block_search import Block

log = logging.getLogger(__name__)


class PruneLayers(PruningStage):
    """Remove whole blocks, such as transformer layers or residual blocks, by measured output error.

    Use it for deep models whose blocks do nearly the same, or where latency is that of layers in
    sequence rather than of their width.

        - stage: prune_layers
          remove: 2
          refit: true

    Unless `blocks` names them, each removal is tried on the model itself, and the block with the
    least error is removed; then the next one is searched among the others. A block whose output has
    another shape than its input stays, and the artifact's facts say why.
    """

    stage: Literal["prune_layers"] = "prune_layers"
    remove: Count | None = None
    """Blocks to remove; or give `keep`, `ratio` or `blocks`."""
    keep: Count | None = None
    """Blocks to keep, of all."""
    ratio: Ratio | None = None
    """Fraction of all blocks to remove, rounded down."""
    blocks: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Names of the blocks to remove, without a search, such as `encoder.layer.3`."""
    exclude: tuple[str, ...] = ()
    """Names of blocks, or of modules around them, that stay; `*` matches any characters."""
    judged_by: Literal["metric", "outputs"] | None = None
    """What the error is: the drop of the `metric` on `val`, or the distance of the `outputs` from
    those before; by default the metric if `val` has targets. Without data the outputs on seeded
    inputs are compared."""
    samples: Count = 512
    """Samples of `val` on which each removal is measured, at most."""
    refit: bool = False
    """Whether the layers behind a removed block are refitted by least squares to their earlier
    outputs: no training and no labels, but a forward pass up to each of them."""
    calibration_samples: CalibrationSamples = None
    """Samples on which layers are refitted. By default 512, or all there are."""
    finetune: AnyFinetune | None = None
    """How the smaller model is trained; its weights change only if an epoch improves the metric."""

    @model_validator(mode="after")
    def _exactly_one_count(self) -> Self:
        names = ("remove", "keep", "ratio", "blocks")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give one of remove, keep, ratio and blocks, found {found}")
        if self.blocks and self.exclude:
            raise ValueError("exclude is for a search, and blocks names what is removed; drop one")
        if self.calibration_samples and not self.refit:
            raise ValueError("calibration_samples are those of a refit; add refit: true")
        return self

    @property
    def needs_data(self) -> bool:
        """Whether there is fine-tuning, a refit, or a metric to measure."""
        return self.finetune is not None or self.refit or self.judged_by == "metric"

    @property
    def drawn_samples(self) -> int:
        """None without a refit."""
        return super().drawn_samples if self.refit else 0

    @property
    def uses_data(self) -> bool:
        """Always: errors are measured on it, if there is any."""
        return True

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Search the blocks unless they are named, remove them, refit, and fine-tune.

        Raises:
            PipelineInvalid: a pattern of ``exclude`` matches no module.
            StageFailed: the model has no repeated blocks or fewer that can be removed, a named one
                is none of them or has to stay, or a setting requires data and there is none.
        """
        edit, facts = self._search(model, context)
        module = model.load()
        edit.apply_(module)
        if self.refit:
            from compress.pruning.recovery.recovery import (
                calibration_batches,
                recover_without_blocks_,
            )

            whole = model.load()
            batches = calibration_batches(self, model, whole, context)
            facts["refit"] = recover_without_blocks_(
                module, whole, edit.kept, batches, context.device, context.work
            )
        weights: torch.nn.Module | Weights = module
        if self.finetune is not None:
            start = model.derive(context.work / "cut", module, edits=[edit])
            fitted = finetune(start, model, self.finetune, context, self.title)
            weights, facts = fitted.weights, facts | fitted.facts()
        lineage = self.lineage(model)
        return model.derive(context.root, weights, edits=[edit], lineage=lineage, facts=facts)

    def _search(
        self, model: EagerModel, context: Context
    ) -> tuple[KeepBlocks, dict[str, JsonValue]]:
        # Imported here, because settings are validated without loading torch.
        from compress.pruning.allocation.ranking import modules_matching
        from compress.pruning.depth import block_search

        module = model.load()
        blocks = block_search.all_blocks(module)
        excluded = modules_matching(module, self.exclude, "prune_layers.exclude")
        refused = {
            b.name: f"excluded by {excluded[b.name]!r}" for b in blocks if b.name in excluded
        }
        inputs = model.signature.example(seed=context.seed)
        others = [block for block in blocks if block.name not in refused]
        refused |= block_search.reasons_to_stay(module, inputs, others)
        free = [block for block in blocks if block.name not in refused]
        count = None if self.blocks else self._count(blocks, len(free))
        meter = block_search.OutputErrorMeter(
            module, model.signature, context, self.judged_by, self.samples
        )
        with located(f"{self.title}: "):
            if self.blocks is not None:
                removal = block_search.remove_named(module, self.blocks, blocks, refused, meter)
            else:
                removal = block_search.search(module, free, count, meter, refused, context.progress)
        removed = [block for block, _ in removal.steps]
        log.info("%s: without %s", self.title, ", ".join(block.name for block in removed))
        kept = block_search.kept_without(module, removed)
        return KeepBlocks(kept=kept), {
            "judged_by": meter.judged_by,
            "harm_alone": {b.name: dict(error.facts()) for b, error in removal.alone.items()},
            "removed": [{"block": b.name, **error.facts()} for b, error in removal.steps],
            "kept": {container: list(indices) for container, indices in kept.items()},
            "stayed": dict(removal.refused),
        }

    def _count(self, blocks: list[Block], free: int) -> int:
        """Return how many blocks are to be removed."""
        if not blocks:
            raise StageFailed(
                f"{self.title}: the model has no repeated blocks: no list or sequence holds two "
                "modules of one class that have parts of their own"
            )
        if self.remove is not None:
            return self.remove
        setting = f"keep: {self.keep}" if self.keep else f"ratio: {self.ratio:g}"
        count = len(blocks) - self.keep if self.keep else floor((self.ratio or 0) * len(blocks))
        if count < 1:
            raise StageFailed(
                f"{self.title}: {setting} of {len(blocks)} blocks removes none; "
                f"{free} of them can be removed"
            )
        return count
