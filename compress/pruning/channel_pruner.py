"""A model on its way from cut to cut: planned, proven, cut, refitted, fine-tuned."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from compress.artifacts.edits.slicing import keep_indices_
from compress.artifacts.recipe import KeepIndices
from compress.common.errors import StageFailed
from compress.common.forward import torch_predictor
from compress.core.stage import DEFAULT_CALIBRATION_SAMPLES
from compress.profiling.benchmark import compare_latency, unmeasurable
from compress.pruning.allocation.budget_search import cut_to_cost, cut_to_latency
from compress.pruning.allocation.cost_model import (
    mac_estimate,
    macs_of,
    parameter_estimate,
    parameters_of,
)
from compress.pruning.allocation.ranking import rank
from compress.pruning.allocation.ratios import Limits
from compress.pruning.recovery.recovery import repair_
from compress.pruning.verification.masked_equivalence import shallow_copy
from compress.pruning.verification.module_rewrites import edits_needed, rewrite_
from compress.pruning.verification.verification_inputs import other_sizes, real_inputs

if TYPE_CHECKING:
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.recipe import AnyEdit
    from compress.checkpoint.state_dict import Weights
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.profiling.benchmark import Comparison
    from compress.pruning.allocation.ranking import Ranking
    from compress.pruning.channels_stage import PruneChannels
    from compress.pruning.dependency.channel_groups import Kept
    from compress.pruning.dependency.group_slices import SlicePlan
    from compress.pruning.dependency.rules.channel_labels import Slot

log = logging.getLogger(__name__)

REASONS_SHOWN = 3
MEASURED_SECONDS = 0.2
"""For which each model is measured, to see whether it became faster."""


class ChannelPruner:
    """Cuts a model in steps, and remembers what was cut and why the rest was not."""

    def __init__(self, stage: PruneChannels, model: EagerModel, context: Context) -> None:
        """Take the settings, the model, and where and on which samples to work."""
        self._stage, self._source, self._context = stage, model, context
        self._batches = samples(stage, context)
        self._loss = context.loss.infer_targets(context.data if stage.uses_loss else None)
        self._inputs = model.signature.example(seed=context.seed)
        self._others = other_sizes(model.signature, context.seed)
        self._real = real_inputs(model.signature, context, self._batches)
        self._one = model.signature.example(batch=1, seed=context.seed)
        self._original = model.load()
        self._before: dict[tuple[Slot, ...], int] = {}
        self._families: dict[tuple[str, ...], dict[str, Any]] = {}
        self._facts: dict[str, Any] = {}
        self._pinned: dict[str, str] = {}
        self.module = model.load()
        self._whole_cut: SlicePlan | None = None
        self._rewriting = self._rewrite_()
        self.edits: list[AnyEdit] = list(self._rewriting)
        """The changes to the architecture so far."""
        self.weights: torch.nn.Module | Weights = self.module
        """The weights so far."""
        self._reference, self._kept = copy.deepcopy(self.module), dict[str, Any]()

    def prune_step_(self, share: float) -> None:
        """Cut a share of all that is to be cut, and repair and train what is left.

        Raises:
            StageFailed: nothing can be cut in the last step.
        """
        cut = self._whole_cut if self._whole_cut and share == 1 else self._plan(share)
        self._whole_cut = None  # the next step has another module to cut
        self._pinned = cut.pinned
        if not cut.groups:
            return
        edit = KeepIndices(kept=cut.kept, attributes=dict(cut.attributes))
        edit.apply_(self.module)
        self.edits.append(edit)
        self._record(cut)
        self._kept = composed(self._kept, cut.kept)
        self._repair_()
        self.weights = self.module
        if self._stage.finetune is not None:
            self._finetune_()

    def require_pruned(self) -> None:
        """Refuse a plan that removes nothing.

        Raises:
            StageFailed: nothing was cut; the message says why.
        """
        if self._families:
            return
        reasons = [f"{name}: {reason}" for name, reason in self._pinned.items()]
        more = f" and {len(reasons) - REASONS_SHOWN} more" * (len(reasons) > REASONS_SHOWN)
        found = "; ".join(reasons[:REASONS_SHOWN]) or "it has no layer with channels"
        raise StageFailed(f"{self._stage.title}: no channel can be removed ({found}{more})")

    def facts(self) -> dict[str, Any]:
        """Return what was cut, what was not and why, and what it brought."""
        costs = {
            name: {"before": int(count(self._original)), "after": int(count(self.module))}
            for name, count in (("parameters", parameters_of), ("macs", self._macs))
        }
        families = list(self._families.values())
        return {"families": families, "pinned": self._pinned, **costs, **self._facts}

    def warn_unless_faster(self) -> None:
        """Log a warning where the model is not faster than it was, measured call by call."""
        compared = self._compared(self.module, batch=1)
        ratio = compared.share
        if ratio is None:
            why = unmeasurable("the speed of what is left", compared.interval.unreliable_reason)
            log.info("%s: %s", self._stage.title, why)
            return
        title, found = self._stage.title, self._families.values()
        before, after = (sum(family[end] for family in found) for end in ("before", "after"))
        log.info("%s: %d of %d channels stay, %.2f of the time", title, after, before, ratio)
        if ratio >= 1:
            log.warning(
                "%s: the smaller model is not faster here: %.2f of the time of a call; its layers "
                "may be too small to matter, or round_to not what this device likes",
                title,
                ratio,
            )

    def _rewrite_(self) -> tuple[AnyEdit, ...]:
        """Put parts that can be cut in the place of those that will be and cannot; return how."""
        edits = rewrite_(self.module, self._inputs, self._real)
        if not edits:
            return ()
        cut = self._plan(1)
        needed = edits_needed(edits, cut)
        if needed == edits:  # the module stays as it is, and so would the plan
            self._whole_cut = cut
            return edits
        self._before.clear()
        self.module = self._source.load()
        for edit in needed:
            edit.apply_(self.module)
        return needed

    def _plan(self, share: float) -> SlicePlan:
        stage, context = self._stage, self._context
        ranking = rank(
            self.module,
            self._inputs,
            stage.importance,
            others=self._others,
            real=self._real,
            include=stage.include,
            exclude=stage.exclude,
            originals=self._before,
            batches=self._batches,
            device=context.device,
            seed=context.seed,
            loss=self._loss,
        )
        for one in ranking.ranked:
            self._before.setdefault(one.family.slots, one.original)
        limits = Limits(stage.scope, stage.round_to, stage.min_channels, stage.max_ratio)
        if stage.ratio is None:
            return self._to_target(ranking, limits, share)
        keep = ranking.allocate(stage.ratio * share, limits)
        return ranking.prove(keep, stage.on_unverified)

    def _to_target(self, ranking: Ranking, limits: Limits, share: float) -> SlicePlan:
        target = self._stage.target
        if target is None:
            raise TypeError("ratio or target is set")
        goal = 1 - (1 - target.share) * share
        how = self._stage.on_unverified
        if target.quantity == "latency":
            batch = target.batch
            return cut_to_latency(
                ranking, limits, goal, lambda cut: self._latency(self._cut(cut), batch), how
            )
        count: Any = parameters_of if target.quantity == "parameters" else self._macs
        if target.quantity == "parameters":
            estimate = parameter_estimate(self.module, ranking.graph)
        else:
            estimate = mac_estimate(self.module, ranking.graph, self._one)
        return cut_to_cost(
            ranking,
            limits,
            goal * count(self._original),
            lambda removed: estimate.of(channel for own in removed for channel in own),
            lambda cut: float(count(self._cut(cut))),
            how,
        )

    def _cut(self, cut: SlicePlan) -> torch.nn.Module:
        """Return a copy of the module with a cut."""
        smaller = shallow_copy(self.module)
        keep_indices_(smaller, cut.kept, cut.attributes)
        return smaller

    def _macs(self, module: torch.nn.Module) -> int:
        return macs_of(module, self._one)

    def _latency(self, module: torch.nn.Module, batch: int) -> float:
        """Return a module's latency over that of the model as it came in.

        Raises:
            StageFailed: the machine is too busy to measure it.
        """
        compared = self._compared(module, batch)
        if compared.share is None:
            raise StageFailed(
                unmeasurable("the latency of a cut", compared.interval.unreliable_reason)
            )
        return compared.share

    def _compared(self, module: torch.nn.Module, batch: int) -> Comparison:
        """Measure a module in turn with the model as it came in; a fixed batch has its own size."""
        device, threads = self._context.device, self._context.threads
        signature = self._source.signature
        size = batch if signature.batch_axis else signature.smallest_batch
        batches = self._context.measured_batches(signature, size)
        with (
            torch_predictor(self._original.to(device), device, threads) as slow,
            torch_predictor(module.to(device), device, threads) as fast,
        ):
            compared = compare_latency(slow, fast, batches, seconds=MEASURED_SECONDS)
        self._original.cpu(), module.cpu()
        return compared

    def _record(self, cut: SlicePlan) -> None:
        for one in cut.groups:
            modules = list(one.group.producers_slots)
            known = self._families.setdefault(
                tuple(modules), {"modules": modules, "before": one.before}
            )
            known["after"] = one.after

    def _repair_(self) -> None:
        if not self._batches:
            return
        self._facts["refit"] = repair_(
            self.module,
            self._reference,
            self._kept,
            self._batches,
            self._context.device,
            refit=self._stage.refit,
        )

    def _finetune_(self) -> None:
        from compress.training.fit import fit

        training, context, title = self._stage.finetune, self._context, self._stage.title
        if training is None:
            return
        number = len(self.edits) - len(self._rewriting)
        start = self._source.derive(context.work / f"cut{number}", self.module, edits=self.edits)
        objective = training.objective(self._source, context)
        fitted = fit(start, training, objective, context, title, accept_start=True)
        self.weights = fitted.weights
        self._facts |= fitted.facts()
        if number < self._stage.iterations:
            tuned = context.work / f"tuned{number}"
            self.module = self._source.derive(tuned, fitted.weights, edits=self.edits).load()
            # Trained layers answer otherwise than the original's, and better.
            self._reference, self._kept = copy.deepcopy(self.module), {}


def samples(stage: PruneChannels, context: Context) -> list[Batch]:
    """Return the calibration samples; none where there is no data and nothing needs them.

    Raises:
        StageFailed: something needs them and they are not there, or there are fewer than asked for.
    """
    if stage.calibration_samples == 0:
        return []
    if context.data is None and not stage.needs_samples:
        return []
    data = context.need_data(stage.title)
    name = data.calibration_split
    if name not in data.datasets and not stage.needs_samples:
        return []
    there: Any = data.split(name)
    count = stage.calibration_samples or min(DEFAULT_CALIBRATION_SAMPLES, len(there))
    return list(data.calibration(count, context.seed))


def composed(first: Kept, second: Kept) -> Kept:
    """Return what is left of tensors that are cut twice, as indices into the uncut ones."""
    kept = {name: dict(axes) for name, axes in first.items()}
    for name, axes in second.items():
        for axis, indices in axes.items():
            before = first.get(name, {}).get(axis)
            now = indices if before is None else tuple(before[i] for i in indices)
            kept.setdefault(name, {})[axis] = now
    return kept
