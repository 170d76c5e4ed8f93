"""Why a pruned model loses the metric: its parts are put back, its causes taken away one by one.

Causes that overlap cannot be compared by what returns without each alone: a group at its own width
returns what a missing refit loses, too. So the model is mended in an order, first by what costs
nothing, and each cause gets what returns beyond those before it.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from compress.artifacts.recipe import KeepBlocks
from compress.common.forward import copy_module
from compress.core.diagnosis.layer_diagnosis import (
    RANGE_SAMPLES,
    UNLIKE,
    WHY,
    LayerDiagnosis,
    input_ranges,
    unlikeness,
    with_ranges,
)
from compress.core.stage import DEFAULT_CALIBRATION_SAMPLES
from compress.pruning.allocation.ranking import Ranking, rank
from compress.pruning.channel_settings import FROM_DATA, Criterion
from compress.pruning.dependency.channel_groups import SlicePlan
from compress.pruning.depth.block_search import all_blocks, kept_without
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.recovery.recovery import (
    ReferenceOutputs,
    batch_norms,
    recover_without_blocks_,
    recovered_slice,
    reestimate_batch_norms_,
    usual_calibration,
)
from compress.pruning.verification.masked_equivalence import VerificationInputs
from compress.pruning.verification.module_rewrites import rewrite_

if TYPE_CHECKING:
    from torch import nn

    from compress.core.val_halves import HalfOfVal
    from compress.data.batch import Batch

RANKED_ON = 128  # samples on which parts are pruned alone, to rank them by the error of the outputs
RANKING_SECONDS = 30.0  # where refitting each cut would take longer, groups are ranked without
BEST_CRITERION: Criterion = "obs"
"""What other criteria are compared with: by far the best without training."""
BEST_METHOD = "sparsegpt"
"""Of `prune_weights`: it alone changes the other weights to compensate the zeros."""


@dataclass(frozen=True)
class Variant:
    """How a model is pruned, without fine-tuning; each stage has some of these settings."""

    method: str = ""
    """Importance of `prune_channels`, or method of `prune_weights`."""
    samples: int = 0
    """Calibration samples for importance, refit and BatchNorm statistics; 0 skips the latter."""
    refit: bool = False
    """Whether layers are refitted, after which statistics are re-estimated, too."""
    batch_norm: bool = False
    """Whether BatchNorm statistics are re-estimated."""
    halfway: bool = False
    """Whether half of the channels or zeros that the stage removes are."""
    matched: bool = False
    """Whether the calibration sample is brought to the range of `val`."""
    back: frozenset[str] = frozenset()
    """Parts that are put back."""


@dataclass(eq=False)
class PruningDiagnosis(LayerDiagnosis):
    """A pruned model without fine-tuning, and its variants: with parts back, or pruned better."""

    _shares: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict, init=False)
    _points: dict[Variant, float] = field(default_factory=dict, init=False)

    @property
    @abstractmethod
    def own(self) -> Variant:
        """The model as the stage has made it, without fine-tuning."""

    @property
    @abstractmethod
    def pruned_parts(self) -> Collection[str]:
        """What the stage has pruned."""

    @abstractmethod
    def remedies(self, layers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each cause with the changes of a variant that mend it, in the order to try them.

        ``layers`` are the guilty parts; there are none where the loss is spread over the model.
        """

    @abstractmethod
    def changed_module(self, variant: Variant) -> nn.Module:
        """Return the module of a variant."""

    @cached_property
    def module(self) -> nn.Module:
        """The module before it is pruned."""
        module: nn.Module = self.model.load()
        return module

    @cached_property
    def calibration(self) -> list[Batch]:
        """Samples for refits and BatchNorm statistics."""
        return usual_calibration(self.context)

    @property
    def notice(self) -> str:
        """That fine-tuning is left out, where there is some."""
        return f"{self.parts} are judged before fine-tuning" if self.stage.finetune else ""

    def drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        """Return the points lost on some samples with some parts put back."""
        if set(layers) >= set(self.pruned_parts):
            return 0.0  # the model that is compared with
        variant = replace(self.own, back=frozenset(layers))
        return self.evaluate_module(half, self.changed_module(variant))

    def shares(self, layers: Sequence[str]) -> dict[str, float]:
        """Return cause → share of the loss that returns without it, beyond those before it."""
        key = tuple(layers)
        if key not in self._shares:
            found: dict[str, float] = {}
            best, returned = self.own, 0.0
            for cause, changes in self.remedies(layers):
                mended = replace(best, **changes)
                if mended not in self._points:
                    module = self.changed_module(mended)
                    self._points[mended] = self.evaluate_module(self.halves[0], module)
                share = self.recovered_share(self._points[mended])
                found[cause] = share - returned
                if share > returned:
                    best, returned = mended, share
            self._shares[key] = found
        return self._shares[key]

    def statistics_shift(self) -> float:
        """Return how far BatchNorm statistics are from those of the pruned model, in deviations.

        Of the layer with the largest shift: the root mean square over its channels.
        """
        module = self.changed_module(self.own)
        norms = batch_norms(module)
        before = [
            (norm.running_mean.clone(), norm.running_var.clone())
            for norm in norms
            if norm.running_mean is not None and norm.running_var is not None
        ]
        reestimate_batch_norms_(module, self.calibration, self.context.device)
        shifts = [0.0]
        for norm, (mean, variance) in zip(norms, before, strict=False):
            if norm.running_mean is not None:
                shift = norm.running_mean.cpu() - mean.cpu()
                shifts.append(float((shift.square() / (variance.cpu() + norm.eps)).mean().sqrt()))
        return max(shifts)

    @property
    def refitted(self) -> Variant:
        """The model as the stage has made it, with a refit."""
        return replace(self.own, refit=True)

    def refit_gain(self) -> float:
        """Return by how many times a refit lowers the error of the outputs."""
        expected = ReferenceOutputs(self.module, self.calibration, self.context.device)
        own, better = (
            expected.error(self.changed_module(variant)) for variant in (self.own, self.refitted)
        )
        return own / max(better, 1e-12)  # a refit may be exact


@dataclass(eq=False)
class CutChannels(PruningDiagnosis):
    """A model of `prune_channels`, cut again in one step, some of whose groups are put back."""

    parts: ClassVar[str] = "groups"
    put_back: ClassVar[str] = "at their own width"

    _plans: dict[Any, tuple[Ranking, SlicePlan]] = field(default_factory=dict, init=False)
    _batches: dict[tuple[int, bool], list[Batch]] = field(default_factory=dict, init=False)

    @cached_property
    def own(self) -> Variant:
        """The cut of the stage."""
        samples = self.stage.available_samples(self.context.need_data(WHY))
        return Variant(self.stage.importance, samples, self.stage.refits)

    @cached_property
    def module(self) -> nn.Module:
        """The module before it is cut, with what the stage rewrites to slice it."""
        module: nn.Module = self.model.load()
        rewrite_(module, self.inputs)
        return module

    @cached_property
    def inputs(self) -> VerificationInputs:
        """What the groups are traced with, and slices compared on."""
        return VerificationInputs.from_signature(self.model.signature, self.context, self.stage)

    @cached_property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Group → channels before, and those that the stage has left."""
        recorded: Any = self.after.manifest.facts["families"]
        left = {x.get("name", x["modules"][0]): x["after"] for x in recorded}
        return {
            one.group.name: (len(one.scores), left.get(one.group.name, len(one.scores)))
            for one in self._ranking("l2", 0, False).ranked
        }

    @property
    def pruned_parts(self) -> list[str]:
        """Groups that the stage has cut."""
        return [name for name, (before, left) in self.widths.items() if left < before]

    def ranked_parts(self) -> list[str]:
        """Return the groups, those first whose cut alone changes the outputs most."""
        batches = self.halves[0].data.batches("val", limit=RANKED_ON)
        expected = ReferenceOutputs(self.module, batches, self.context.device)
        ranking, plan = self._plan(self.own)
        errors: dict[str, float] = {}
        recovers = bool(self.own.samples)
        for one in plan.groups:
            began = time.monotonic()
            few = self.samples_for(min(RANKED_ON, self.own.samples)) if recovers else ()
            module = self._sliced([one], ranking, few, refit=self.own.refit)
            errors[one.group.name] = expected.error(module)
            if recovers and len(errors) == 1:
                recovers = (time.monotonic() - began) * len(plan.groups) < RANKING_SECONDS
        return sorted(errors, key=lambda name: -errors[name])

    def removed_share(self, group: str = "") -> float:
        """Return the share of a group's channels that was removed, or of all groups' together."""
        widths = [self.widths[group]] if group else [*self.widths.values()]
        return 1 - sum(left for _, left in widths) / sum(before for before, _ in widths)

    def remedies(self, layers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what costs nothing first: sample, BatchNorm statistics, refit, criterion."""
        own, usual, is_unlike = self.own, self.usual_samples, self.is_unlike_val
        drawn = {} if own.samples else {"samples": usual}
        if own.samples and is_unlike:
            yield "calibration_unlike_val", {"matched": True}
        if not own.samples and batch_norms(self.module):
            yield "stale_batch_norm", {**drawn, "refit": False, "matched": is_unlike}
        if not own.samples or not own.refit:
            yield "no_refit", {**drawn, "refit": True, "matched": is_unlike}
        if 0 < own.samples < usual:
            yield "few_calibration_samples", {"samples": usual}
        if own.method != BEST_CRITERION:
            yield "poor_criterion", {**drawn, "method": BEST_CRITERION, "refit": True}
        if layers and not self.spread:
            yield "group_too_narrow", {"back": frozenset(layers)}
        else:
            yield "ratio_too_high", {"halfway": True}

    @property
    def refitted(self) -> Variant:
        """The cut of the stage with a refit, for which it needs samples."""
        samples = self.own.samples or self.usual_samples
        return replace(self.own, samples=samples, refit=True)

    @cached_property
    def usual_samples(self) -> int:
        """Calibration samples that the stage draws by default."""
        data: Any = self.context.need_data(WHY)
        return min(DEFAULT_CALIBRATION_SAMPLES, len(data.split(data.calibration_split)))

    @cached_property
    def sample_unlikeness(self) -> float:
        """By how many times the calibration sample's range differs from that of `val`."""
        return unlikeness(*self._ranges)

    @property
    def is_unlike_val(self) -> bool:
        """Whether samples that mend something have to be brought to the range of `val`."""
        return self.sample_unlikeness > UNLIKE

    def unlike_best(self, group: str) -> float:
        """Return the share of a group's removed channels that the best criterion would keep."""
        removed = []
        for importance in (self.stage.importance, BEST_CRITERION):
            _, plan = self._plan(replace(self.own, method=importance))
            own = (one.removed for one in plan.groups if one.group.name == group)
            removed.append({channel for channels in own for channel in channels})
        return len(removed[0] - removed[1]) / max(1, len(removed[0]))

    def changed_module(self, variant: Variant) -> nn.Module:
        """Return the module of a cut, with its layers refitted."""
        ranking, plan = self._plan(variant)
        slices = [one for one in plan.groups if one.group.name not in variant.back]
        batches = (
            self.samples_for(variant.samples, variant.matched) if variant.samples and slices else ()
        )
        return self._sliced(slices, ranking, batches, refit=variant.refit)

    @cached_property
    def calibration(self) -> list[Batch]:
        """As many samples as the stage draws by default, in the range of `val`."""
        return self.samples_for(self.usual_samples, self.is_unlike_val)

    def samples_for(self, samples: int, matched: bool = False) -> list[Batch]:
        """Return calibration samples, brought to the range of `val` if asked for."""
        key = samples, matched
        if key not in self._batches:
            data = self.context.need_data(WHY)
            batches = list(data.calibration(samples, self.context.seed))
            if matched:
                batches = [with_ranges(batch, *self._ranges) for batch in batches]
            self._batches[key] = batches
        return self._batches[key]

    @cached_property
    def _ranges(self) -> tuple[Any, Any]:
        data = self.context.need_data(WHY)
        samples = self.samples_for(self.own.samples or self.usual_samples)
        return input_ranges(samples), input_ranges(data.batches("val", limit=RANGE_SAMPLES))

    def _sliced(
        self, slices: Sequence[Any], ranking: Ranking, batches: Sequence[Batch], *, refit: bool
    ) -> nn.Module:
        """Return the module without some channels, recovered on batches if there are any."""
        plan = SlicePlan.combine(slices, {}, ranking.graph)
        return recovered_slice(self.module, plan, batches, self.context.device, refit=refit)

    def _ranking(self, importance: str, samples: int, matched: bool) -> Ranking:
        batches = self.samples_for(samples, matched) if samples else ()
        scoring = ScoringSamples.from_context(self.context, self.model.signature, batches)
        selection = self.stage.model_copy(update={"importance": importance})
        return rank(self.module, self.inputs, selection, scoring)

    def _plan(self, cut: Variant) -> tuple[Ranking, SlicePlan]:
        """Return a ranking and the verified slices of all groups, the same for all refits."""
        from_data = cut.method in FROM_DATA
        samples = (cut.samples or self.usual_samples) if from_data else 0
        key = cut.method, samples, cut.matched and from_data, cut.halfway
        if key not in self._plans:
            ranking = self._ranking(cut.method, samples, cut.matched)
            counts = []
            for one in ranking.ranked:
                before = len(one.scores)
                # Rounded up: half of a cut by one channel is none.
                left = self.widths.get(one.group.name, (before, before))[1]
                counts.append((before + left + 1) // 2 if cut.halfway else left)
            self._plans[key] = ranking, ranking.verify(counts)
        return self._plans[key]


@dataclass(eq=False)
class ZeroedWeights(PruningDiagnosis):
    """A model of `prune_weights`, some of whose weights are put back."""

    put_back: ClassVar[str] = "with all of their weights"

    _pruned: dict[tuple[str, bool], dict[str, torch.Tensor]] = field(
        default_factory=dict, init=False
    )
    """Method, and whether halfway → the tensors with zeros."""

    @cached_property
    def zeros(self) -> dict[str, float]:
        """Tensors with zeros → their share of them."""
        recorded: Any = self.after.manifest.facts["zeros"]
        return {name: share for name, share in recorded["by_weight"].items() if share > 0}

    @property
    def own(self) -> Variant:
        """The zeros of the stage."""
        return Variant(self.stage.method, batch_norm=self.stage.batch_norm == "reestimate")

    @property
    def pruned_parts(self) -> Collection[str]:
        """Tensors with zeros."""
        return self.zeros

    def ranked_parts(self) -> list[str]:
        """Return the tensors, those first whose zeros alone change the outputs most."""
        batches = self.halves[0].data.batches("val", limit=RANKED_ON)
        expected = ReferenceOutputs(self.module, batches, self.context.device)
        errors = {}
        for name in self.zeros:
            others = frozenset(self.zeros) - {name}
            alone = self.changed_module(replace(self.own, back=others))
            errors[name] = expected.error(alone)
        return sorted(errors, key=lambda name: -errors[name])

    def remedies(self, layers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what costs nothing first: BatchNorm statistics, then the method."""
        if not self.own.batch_norm and batch_norms(self.module):
            yield "stale_batch_norm", {"batch_norm": True}
        if self.own.method != BEST_METHOD:
            yield "poor_method", {"method": BEST_METHOD}
        if layers and not self.spread:
            yield "layer_too_sparse", {"back": frozenset(layers)}
        elif self.stage.amount is not None:
            yield "amount_too_high", {"halfway": True}

    def changed_module(self, variant: Variant) -> nn.Module:
        """Return the module with the zeros of a variant."""
        module = copy_module(self.module)
        pruned = self._pruned_tensors(variant.method, variant.halfway)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name in pruned.keys() - variant.back:
                parameters[name].copy_(pruned[name])
        if variant.batch_norm:
            reestimate_batch_norms_(module, self.calibration, self.context.device)
        return module.eval()

    def _pruned_tensors(self, method: str, halfway: bool) -> dict[str, torch.Tensor]:
        """Return the tensors that the stage changes, pruned by a method without fine-tuning."""
        key = method, halfway
        if key not in self._pruned:
            # Without training, its schedule and what follows it.
            left_out = ("finetune", "schedule", "until", "updates", "batch_norm")
            changes: dict[str, Any] = {**dict.fromkeys(left_out), "method": method}
            if halfway and self.stage.amount is not None:
                changes["amount"] = self.stage.amount / 2
            if method == BEST_METHOD:
                # A method that calibrates ranks within layers, and refuses `scope: global`.
                changes["scope"] = None
                if not self.stage.calibrates:  # it draws none, and may set more than there are
                    changes["calibration_samples"] = None
            with self.context.in_temporary_folder() as context:
                made = self.stage.with_settings(changes).run(self.model, context)
                parameters = dict(made.load().named_parameters(remove_duplicate=False))
            self._pruned[key] = {
                name: parameters[name].detach() for name in self.zeros if name in parameters
            }
        return self._pruned[key]


@dataclass(eq=False)
class RemovedBlocks(PruningDiagnosis):
    """A model of `prune_layers`, some of whose blocks are put back."""

    parts: ClassVar[str] = "blocks"
    put_back: ClassVar[str] = "back"

    @property
    def own(self) -> Variant:
        """The blocks that the stage removes."""
        return Variant(refit=self.stage.refit)

    @property
    def pruned_parts(self) -> list[str]:
        """Blocks that the stage has removed, in order."""
        recorded: Any = self.after.manifest.facts["removed"]
        return [step["block"] for step in recorded]

    def ranked_parts(self) -> list[str]:
        """Return the blocks; the last ones cost most, as the stage removes the cheapest first."""
        return self.pruned_parts[::-1]

    def remedies(self, layers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield BatchNorm statistics, a refit, then the blocks themselves."""
        if not self.own.refit and batch_norms(self.module):
            yield "stale_batch_norm", {"batch_norm": True}
        if not self.own.refit:
            yield "no_refit", {"refit": True}
        if layers:
            yield "block_needed", {"back": frozenset(layers)}

    def changed_module(self, variant: Variant) -> nn.Module:
        """Return the module without the blocks of a variant."""
        module, device = copy_module(self.module), self.context.device
        gone = [b for b in all_blocks(module) if b.name in {*self.pruned_parts} - variant.back]
        kept = kept_without(module, gone)
        if gone:
            KeepBlocks(kept=kept).apply_(module)
        if variant.refit and gone:
            reference = copy_module(self.module)
            recover_without_blocks_(module, reference, kept, self.calibration, device)
        elif variant.batch_norm:
            reestimate_batch_norms_(module, self.calibration, device)
        return module.eval()
