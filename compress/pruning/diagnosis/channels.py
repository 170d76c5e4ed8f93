"""A model of `prune_channels` whose groups of channels are put back to their own width."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from compress.common.forward import copy_module
from compress.core.diagnosis.input_ranges import (
    SAMPLES,
    UNLIKE,
    input_ranges,
    unlikeness,
    with_ranges,
)
from compress.core.diagnosis.layer_diagnosis import WHY
from compress.core.stage import DEFAULT_CALIBRATION_SAMPLES
from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import FROM_DATA
from compress.pruning.dependency.channel_groups import SlicePlan
from compress.pruning.diagnosis.diagnosis import PruningDiagnosis, batch_norm_shift
from compress.pruning.recovery.recovery import batch_norms, output_error, recover_
from compress.pruning.verification.masked_equivalence import sliced_copy
from compress.pruning.verification.module_rewrites import rewrite_
from compress.pruning.verification.verification_inputs import other_sizes, real_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import nn

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.core.val_halves import HalfOfVal
    from compress.data.batch import Batch
    from compress.pruning.allocation.ranking import Ranking
    from compress.pruning.channel_settings import Criterion
    from compress.pruning.prune_channels import PruneChannels

RANKED_ON = 128
"""Samples on which groups are cut alone, to rank them by the error of the outputs."""
RANKING_SECONDS = 30.0
"""Where refitting each cut would take longer, groups are ranked without."""
BEST_CRITERION: Criterion = "obs"
"""What other criteria are compared with: by far the best without training."""


@dataclass(frozen=True)
class Cut:
    """How a model is cut."""

    importance: Criterion
    samples: int
    """Calibration samples for importance, refit and BatchNorm statistics; 0 skips the latter."""
    refit: bool
    back: frozenset[str] = frozenset()
    """Groups that keep their own width."""
    halfway: bool = False
    """Whether all groups lose half of the channels that the stage removes."""
    matched: bool = False
    """Whether the calibration sample is brought to the range of `val`."""


@dataclass
class CutChannels(PruningDiagnosis[Cut]):
    """A model of `prune_channels`, cut again in one step and without fine-tuning."""

    parts: ClassVar[str] = "groups"
    put_back: ClassVar[str] = "at their own width"

    stage: PruneChannels
    module: nn.Module
    """The model before it is cut."""
    inputs: tuple[Any, ...]
    widths: dict[str, int]
    """Group → channels that the stage has left of it."""
    whole: dict[str, int]
    """Group → its channels before."""
    _plans: dict[Any, tuple[Ranking, SlicePlan]] = field(default_factory=dict, init=False)
    _batches: dict[tuple[int, bool], list[Batch]] = field(default_factory=dict, init=False)

    @classmethod
    def create(
        cls,
        stage: PruneChannels,
        model: EagerModel,
        after: Artifact,
        context: Context,
        points: float,
    ) -> Self:
        """Cut the model again, and rank its groups by what each cut alone changes.

        Args:
            stage: the stage with its settings.
            model: the model that it reads.
            after: what it made; its facts have the groups' widths.
            context: data, metric and seed of the run.
            points: what the refused gate allows.
        """
        module, inputs = model.load(), model.signature.example(seed=context.seed)
        others = other_sizes(model.signature, 0)
        real = real_inputs(model.signature, context)
        rewrite_(module, inputs, real, others, across_norms=stage.across_norms)
        recorded: Any = after.manifest.facts["families"]
        halves = cls.halves(model, context)
        found = cls(model, context, *halves, stage, module, tuple(inputs), {}, {})
        kept = {tuple(family["modules"]): family for family in recorded}
        ranking = found._ranking("l2", 0, False)
        for one in ranking.ranked:
            family = kept.get(one.group.producers)
            found.whole[one.group.name] = len(one.scores)
            if family is not None:
                found.widths[one.group.name] = family["after"]
        found.begin(found._ranked_groups(), points)
        return found

    @property
    def own(self) -> Cut:
        """The cut of the stage."""
        return Cut(self.stage.importance, self._own_samples, self.stage.refits)

    @property
    def notice(self) -> str:  # type: ignore[override]
        """That fine-tuning is left out, where there is some."""
        return "groups are judged before fine-tuning" if self.stage.finetune else ""

    @property
    def cut_groups(self) -> list[str]:
        """Groups that the stage has cut."""
        return [name for name, width in self.widths.items() if width < self.whole[name]]

    def removed_share(self, group: str = "") -> float:
        """Return the share of a group's channels that was removed, or of all groups' together."""
        names = [group] if group else list(self.whole)
        before = sum(self.whole[name] for name in names)
        left = sum(self.widths.get(name, self.whole[name]) for name in names)
        return 1 - left / before

    def remedies(self, layers: Sequence[str]) -> Iterator[tuple[str, Callable[[Cut], Cut]]]:
        """Yield what costs nothing first: sample, BatchNorm statistics, refit, criterion."""
        own, usual = self.own, self.usual_samples
        if own.samples and self.sample_unlikeness > UNLIKE:
            yield "calibration_unlike_val", lambda cut: replace(cut, matched=True)
        if not own.samples and batch_norms(self.module):
            yield (
                "stale_batch_norm",
                lambda cut: replace(cut, samples=usual, refit=False, matched=self._matches),
            )
        if not own.samples or not own.refit:
            yield (
                "no_refit",
                lambda cut: replace(
                    cut, samples=cut.samples or usual, refit=True, matched=self._matches
                ),
            )
        if 0 < own.samples < usual:
            yield "few_calibration_samples", lambda cut: replace(cut, samples=usual)
        if own.importance != BEST_CRITERION:
            yield (
                "poor_criterion",
                lambda cut: replace(
                    cut, importance=BEST_CRITERION, samples=cut.samples or usual, refit=True
                ),
            )
        if layers and not self.spread:
            yield "group_too_narrow", lambda cut: replace(cut, back=frozenset(layers))
        else:
            yield "ratio_too_high", lambda cut: replace(cut, halfway=True)

    @cached_property
    def usual_samples(self) -> int:
        """Calibration samples that the stage draws by default."""
        data: Any = self.context.need_data(WHY)
        return min(DEFAULT_CALIBRATION_SAMPLES, len(data.split(data.calibration_split)))

    @cached_property
    def sample_unlikeness(self) -> float:
        """By how many times the calibration sample's range differs from that of `val`."""
        return unlikeness(*self._ranges)

    def statistics_shift(self) -> float:
        """Return how far BatchNorm statistics are from those of the cut model, in deviations."""
        batches = self.calibration(self.usual_samples, self._matches)
        return batch_norm_shift(self.changed_module(self.own), batches, self.context.device)

    def refit_gain(self) -> float:
        """Return by how many times a refit lowers the error of the outputs."""
        own = self.own
        refitted = replace(own, samples=own.samples or self.usual_samples, refit=True)
        batches = self.calibration(self.usual_samples, self._matches)
        errors = [
            output_error(self.changed_module(cut), self.module, batches, self.context.device)
            for cut in (own, refitted)
        ]
        return errors[0] / max(errors[1], 1e-12)

    def unlike_best(self, group: str) -> float:
        """Return the share of a group's removed channels that the best criterion would keep."""
        removed = []
        for importance in (self.stage.importance, BEST_CRITERION):
            _, plan = self._plan(replace(self.own, importance=importance))
            own = (one.removed for one in plan.groups if one.group.name == group)
            removed.append({channel for channels in own for channel in channels})
        return len(removed[0] - removed[1]) / max(1, len(removed[0]))

    def changed_module(self, cut: Cut) -> nn.Module:
        """Return the module of a cut, with its layers refitted."""
        ranking, plan = self._plan(cut)
        slices = [one for one in plan.groups if one.group.name not in cut.back]
        combined = SlicePlan.combine(slices, {}, ranking.graph)
        # A slice shares the tensors that it leaves whole, and a refit changes them in place.
        module = copy_module(sliced_copy(self.module, combined.kept, combined.attributes))
        if cut.samples and slices:
            self._recover_(module, combined, self.calibration(cut.samples, cut.matched), cut.refit)
        return module

    def calibration(self, samples: int, matched: bool = False) -> list[Batch]:
        """Return calibration samples, brought to the range of `val` if asked for."""
        key = samples, matched
        if key not in self._batches:
            data = self.context.need_data(WHY)
            batches = list(data.calibration(samples, self.context.seed))
            if matched:
                batches = [with_ranges(batch, *self._ranges) for batch in batches]
            self._batches[key] = batches
        return self._batches[key]

    @property
    def _own_samples(self) -> int:
        return self.stage.available_samples(self.context.need_data(WHY))

    @cached_property
    def _ranges(self) -> tuple[Any, Any]:
        data = self.context.need_data(WHY)
        samples = self.calibration(self._own_samples or self.usual_samples)
        return input_ranges(samples), input_ranges(data.batches("val", limit=SAMPLES))

    @property
    def _matches(self) -> bool:
        """Whether samples that mend something have to be brought to the range of `val`."""
        return self.sample_unlikeness > UNLIKE

    def _recover_(
        self, module: nn.Module, plan: SlicePlan, batches: Sequence[Batch], refit: bool
    ) -> None:
        reference = copy_module(self.module)
        recover_(module, reference, plan.kept, batches, self.context.device, refit=refit)

    def _drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        if set(layers) >= set(self.cut_groups):
            return 0.0  # the model that is compared with
        variant = replace(self.own, back=frozenset(layers))
        return self._judge_module(half, self.changed_module(variant))

    def _ranking(self, importance: Criterion, samples: int, matched: bool) -> Ranking:
        context, stage = self.context, self.stage
        return rank(
            self.module,
            self.inputs,
            importance,
            others=other_sizes(self.model.signature, 0),
            real=real_inputs(self.model.signature, context),
            include=stage.include,
            exclude=stage.exclude,
            across_norms=stage.across_norms,
            batches=self.calibration(samples, matched) if samples else (),
            device=context.device,
            seed=context.seed,
            loss=context.loss.for_model(self.model.signature).infer_targets(context.data),
        )

    def _plan(self, cut: Cut) -> tuple[Ranking, SlicePlan]:
        """Return a ranking and the verified slices of all groups, the same for all refits."""
        from_data = cut.importance in FROM_DATA
        samples = (cut.samples or self.usual_samples) if from_data else 0
        key = cut.importance, samples, cut.matched and from_data, cut.halfway
        if key not in self._plans:
            ranking = self._ranking(cut.importance, samples, cut.matched)
            counts = []
            for one in ranking.ranked:
                whole = len(one.scores)
                left = self.widths.get(one.group.name, whole)
                counts.append((whole + left + 1) // 2 if cut.halfway else left)
            self._plans[key] = ranking, ranking.verify(counts)
        return self._plans[key]

    def _ranked_groups(self) -> list[str]:
        """Return the groups, those first whose cut alone changes the outputs most."""
        batches = list(self.decided_on.data.batches("val", limit=RANKED_ON))
        ranking, plan = self._plan(self.own)
        errors: dict[str, float] = {}
        recovers = bool(self.own.samples)
        for one in plan.groups:
            began = time.monotonic()
            combined = SlicePlan.combine([one], {}, ranking.graph)
            module = copy_module(sliced_copy(self.module, combined.kept, combined.attributes))
            if recovers:
                few = self.calibration(min(RANKED_ON, self.own.samples))
                self._recover_(module, combined, few, self.own.refit)
            errors[one.group.name] = output_error(module, self.module, batches, self.context.device)
            if recovers and not errors.keys() - {one.group.name}:
                recovers = (time.monotonic() - began) * len(plan.groups) < RANKING_SECONDS
        return sorted(errors, key=lambda name: -errors[name])
