"""Remove channels from a model in steps: rank, allocate, verify, slice, recover."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.artifacts.recipe import AnyEdit, KeepIndices
from compress.common.errors import StageFailed
from compress.common.forward import copy_module, torch_predictor
from compress.graph.flops import count_macs
from compress.profiling.benchmark import Comparison, NotMeasurable, compare_latency, unmeasurable
from compress.pruning.allocation.ranking import (
    mac_estimate,
    parameter_estimate,
    plan_for_target,
    rank,
)
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.latency.widths import solve_widths
from compress.pruning.pruning_stage import Finetune, finetune
from compress.pruning.recovery.recovery import calibration_batches, recover_
from compress.pruning.verification.masked_equivalence import VerificationInputs
from compress.pruning.verification.module_rewrites import edits_needed, rewrite_

if TYPE_CHECKING:
    import torch

    from compress.artifacts.eager_model import EagerModel
    from compress.checkpoint.state_dict import Weights
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.pruning.allocation.ranking import CostEstimate
    from compress.pruning.channel_settings import ChannelSettings
    from compress.pruning.dependency.channel_groups import Kept, SlicePlan
    from compress.pruning.dependency.rules.channel_labels import Slot

log = logging.getLogger(__name__)

REASONS_SHOWN = 3
MEASURED_SECONDS = 0.2  # seconds for which each model is called when latencies are compared


class ChannelPruner:
    """Removes channels from one model, and records what was removed and why the rest was not."""

    def __init__(self, config: ChannelSettings, model: EagerModel, context: Context) -> None:
        """Load the model and the calibration samples."""
        self._config, self._source, self._context = config, model, context
        # Twice, because the second is sliced in place.
        self._unpruned, self._module = model.load(), model.load()
        self._batches: list[Batch] = []
        if config.drawn_samples and (context.data is not None or config.needs_samples):
            data = context.need_data(config.title)
            if data.calibration_split in data.datasets or config.needs_samples:
                self._batches = calibration_batches(config, model, self._unpruned, context)
        loss = context.loss.for_model(model.signature)
        loss = loss.infer_targets(context.data if config.uses_loss else None)
        self._scoring = ScoringSamples(self._batches, context.device, context.seed, loss)
        self._inputs = VerificationInputs.from_signature(
            model.signature, context, config, self._batches
        )
        sizes = context.typical_sizes(model.signature)
        self._one_sample = model.signature.example(batch=1, seed=context.seed, sizes=sizes)
        self._weights: torch.nn.Module | Weights = self._module
        self._rewrites: tuple[AnyEdit, ...] = ()
        self._slices: list[AnyEdit] = []
        self._original_sizes: dict[tuple[Slot, ...], int] = {}
        """Slots of a group → its channels before the first step."""
        self._groups: dict[str, dict[str, Any]] = {}
        """Group → the fact about its channels before and after."""
        self._facts: dict[str, Any] = {}
        self._widths: Mapping[str, int] | None = config.widths

    def run(self) -> tuple[torch.nn.Module | Weights, list[AnyEdit], dict[str, Any]]:
        """Prune in ``iterations`` steps; return the weights, the edits that led there and facts."""
        config, context = self._config, self._context
        # Widths that reach a target of latency, where it is known what will serve.
        solved = solve_widths(config, self._source, context, self._batches)
        if solved is not None:
            self._widths, self._facts["latency"] = solved
        plan_for_rewrites = self._rewrite_()
        # What the refit aims at: the outputs of this module, of whose tensors `kept` is left.
        self._reference, self._kept = copy_module(self._module), dict[str, Any]()
        for step in range(1, config.iterations + 1):
            context.progress(config.title, step - 1, config.iterations, "plan and verify")
            if step == config.iterations == 1 and plan_for_rewrites:
                plan = plan_for_rewrites
            else:
                plan = self._plan(step / config.iterations)
            if not plan.groups:
                continue
            self._slice_(plan)
            if self._batches:
                self._facts["refit"] = recover_(
                    self._module,
                    self._reference,
                    self._kept,
                    self._batches,
                    context.device,
                    refit=config.refits,
                    folder=context.work,
                )
            if config.finetune is not None:
                self._finetune_(config.finetune)
        if not self._groups:
            reasons = [f"{name}: {reason}" for name, reason in plan.pinned.items()]
            more = f" and {len(reasons) - REASONS_SHOWN} more" * (len(reasons) > REASONS_SHOWN)
            shown = "; ".join(reasons[:REASONS_SHOWN]) or "it has no layer with channels"
            hint = self._across_norms_hint()
            raise StageFailed(f"{config.title}: no channel can be removed ({shown}{more}){hint}")
        self._log_speedup()
        self._check_solved_widths()
        before, after = self._unpruned, self._module
        inputs = self._one_sample
        facts = {
            "families": list(self._groups.values()),
            "pinned": plan.pinned,
            "parameters": {"before": parameters_of(before), "after": parameters_of(after)},
            "macs": {"before": count_macs(before, inputs), "after": count_macs(after, inputs)},
            **self._facts,
        }
        return self._weights, [*self._rewrites, *self._slices], facts

    def _check_solved_widths(self) -> None:
        """Leave the measured latency out of the facts where other channels stay than were solved.

        It is a slice that real samples, or slices of other groups, do not verify.
        """
        facts = self._facts.get("latency")
        if facts is None or self._widths is None:
            return
        left = {group: fact["after"] for group, fact in self._groups.items()}
        if any(left.get(group) != width for group, width in self._widths.items()):
            del facts["measured"], facts["ms"]
            log.warning(
                "%s: some channels that should go cannot, so the target of latency is not checked",
                self._config.title,
            )

    def _across_norms_hint(self) -> str:
        """Return the advice to set ``across_norms``, if normalisations alone hold some channels."""
        config = self._config
        if config.across_norms or config.include or config.exclude:
            return ""
        held, free = (
            {g.name for g in replace(self._inputs, across_norms=across).trace(self._module).groups}
            for across in (True, False)
        )
        names = sorted(held - free)
        if not names:
            return ""
        return (
            f"; only normalisations hold those of {', '.join(names[:REASONS_SHOWN])}: "
            "set across_norms: true to remove them"
        )

    def _rewrite_(self) -> SlicePlan | None:
        """Replace modules that cannot be sliced; return a full plan if it needs all of these."""
        edits = rewrite_(self._module, self._inputs)
        if not edits:
            return None
        plan = self._plan(share=1)
        self._rewrites = edits_needed(edits, plan)
        if self._rewrites == edits:
            return plan
        # Sizes are kept by tensor names, which a replacement changes.
        self._original_sizes.clear()
        self._weights = self._module = self._source.load()
        for edit in self._rewrites:
            edit.apply_(self._module)
        return None

    def _plan(self, share: float) -> SlicePlan:
        """Rank channels, and plan verified slices that reach a share of the ratio or target."""
        config = self._config
        progress, sizes = self._context.progress, self._original_sizes
        ranking = rank(self._module, self._inputs, config, self._scoring, sizes, progress)
        for one in ranking.ranked:
            self._original_sizes.setdefault(one.group.slots, one.original)
        if self._widths is not None:
            return ranking.verify(ranking.counts_for(self._widths, share), config.on_unverified)
        if config.target is None:
            keep = ranking.allocate((config.ratio or 0.0) * share, config)
            return ranking.verify(keep, config.on_unverified)
        # Of the unpruned model's cost; its latency is measured together with each candidate's.
        goal = 1 - (1 - config.target.share) * share
        estimate: CostEstimate | None = None
        if config.target.latency:
            measure: Callable[[torch.nn.Module], float]
            measure = partial(self._latency, batch=config.target.batch)
        elif config.target.parameters:
            measure, estimate = parameters_of, parameter_estimate(self._module, ranking.graph)
            goal *= measure(self._unpruned)
        else:
            measure = partial(count_macs, inputs=self._one_sample)
            estimate = mac_estimate(self._module, ranking.graph, self._one_sample)
            goal *= measure(self._unpruned)
        return plan_for_target(ranking, config, goal, measure, estimate)

    def _slice_(self, plan: SlicePlan) -> None:
        """Remove the channels from the module, and record the edit and the groups' sizes."""
        edit = KeepIndices(kept=plan.kept, attributes=dict(plan.attributes))
        edit.apply_(self._module)
        self._slices.append(edit)
        self._weights = self._module
        self._kept = compose_kept(self._kept, plan.kept)
        for one in plan.groups:
            size, modules = len(one.group.channels), one.group.producers
            new = {"modules": list(modules), "before": size}
            if one.group.name != modules[0]:  # another group has channels of the same modules
                new["name"] = one.group.name
            fact = self._groups.setdefault(one.group.name, new)
            fact["after"] = one.after

    def _finetune_(self, training: Finetune) -> None:
        """Train the sliced model; the next step continues from the trained weights."""
        source, work, number = self._source, self._context.work, len(self._slices)
        edits = [*self._rewrites, *self._slices]
        start = source.derive(work / f"cut{number}", self._module, edits=edits)
        fitted = finetune(start, source, training, self._context, self._config.title)
        self._weights = fitted.weights
        self._facts |= fitted.facts()
        if number < self._config.iterations:
            tuned = source.derive(work / f"tuned{number}", fitted.weights, edits=edits)
            self._module = tuned.load()
            # The trained model's outputs are better than the unpruned one's: refit to them.
            self._reference, self._kept = copy_module(self._module), {}

    def _latency(self, module: torch.nn.Module, batch: int) -> float:
        """Return a module's latency over that of the unpruned model."""
        compared = self._compare_latency(module, batch)
        if compared.share is None:
            raise NotMeasurable(unmeasurable("the latency of a cut", compared.speedup_doubt))
        return compared.share

    def _compare_latency(self, module: torch.nn.Module, batch: int) -> Comparison:
        """Measure a module alternating with the unpruned model; a fixed batch size wins."""
        device, threads = self._context.device, self._context.threads
        signature = self._source.signature
        size = batch if signature.batch_axis else signature.smallest_batch
        batches = self._context.measured_batches(signature, size)
        both = (self._unpruned.to(device), module.to(device))
        slow, fast = (partial(torch_predictor, one, device, threads) for one in both)
        compared = compare_latency(slow, fast, batches, MEASURED_SECONDS, threads=threads)
        self._unpruned.cpu(), module.cpu()
        return compared

    def _log_speedup(self) -> None:
        """Log the measured latency of the pruned model, as a warning if it is not faster."""
        title, groups, target = self._config.title, self._groups.values(), self._config.target
        batch = 1 if target is None else target.batch
        compared = self._compare_latency(self._module, batch)
        ratio = compared.share
        if target is not None and target.latency and "latency" not in self._facts:
            self._facts["latency"] = {
                "runtime": "PyTorch",
                "batch": batch,
                "target": target.latency,
                "measured": None if ratio is None else round(ratio, 4),
            }
        if ratio is None:
            reason = unmeasurable("the speed of what is left", compared.speedup_doubt)
            log.info("%s: %s", title, reason)
            return
        before, after = (sum(group[end] for group in groups) for end in ("before", "after"))
        log.info("%s: %d of %d channels stay, %.2f of the time", title, after, before, ratio)
        if ratio >= 1:
            log.warning(
                "%s: the smaller model is not faster here: %.2f of the time of a call; its layers "
                "may be too small to matter, or round_to may not suit this device",
                title,
                ratio,
            )


def parameters_of(module: torch.nn.Module) -> int:
    """Count a module's weights, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def compose_kept(first: Kept, second: Kept) -> Kept:
    """Compose two slices in turn: indices into the tensors before the first one."""
    kept = {name: dict(axes) for name, axes in first.items()}
    for name, axes in second.items():
        for axis, indices in axes.items():
            before = first.get(name, {}).get(axis)
            composed = indices if before is None else tuple(before[i] for i in indices)
            kept.setdefault(name, {})[axis] = composed
    return kept
