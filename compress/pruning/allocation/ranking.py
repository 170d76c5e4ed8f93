"""Which channels go: how many of each family, the least important first, each cut proven."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeAlias

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.loss import INFERRED_LOSS
from compress.pruning.allocation.ratios import Limits, Ranked, allocate
from compress.pruning.dependency.graph import trace
from compress.pruning.dependency.group_slices import GroupSlice
from compress.pruning.importance.criteria import COMPARABLE, Criterion
from compress.pruning.importance.scores import score_families
from compress.pruning.verification.masked_equivalence import MaskedEquivalence
from compress.pruning.verification.verified_slices import prove

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch
    from torch import nn

    from compress.core.loss import Loss
    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup
    from compress.pruning.dependency.group_slices import SlicePlan
    from compress.pruning.dependency.rules.channel_labels import Slot

OnUnverified: TypeAlias = Literal["pin", "error"]
Originals: TypeAlias = "Mapping[tuple[Slot, ...], int]"
"""Tensors and axes of a family → its channels before the first of several cuts."""


@dataclass(frozen=True)
class Ranking:
    """A module's families with their scores: all that a plan needs, whatever its size."""

    module: nn.Module
    graph: AxisGraph
    ranked: tuple[Ranked, ...]
    pinned: Mapping[str, str]
    """Module → why its channels stay, known before any cut."""
    comparable: bool
    """Whether scores mean the same in every family."""
    proof: MaskedEquivalence

    def allocate(self, ratio: float, limits: Limits) -> list[int]:
        """Return how many channels of each family stay."""
        return allocate(self.ranked, ratio, limits, comparable=self.comparable)

    def removed(self, keep: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the least important channels of each family, all but as many as stay."""
        return [
            tuple(
                one.family.channels[i]
                for i in one.scores.argsort(stable=True)[: len(one.scores) - count].tolist()
            )
            for one, count in zip(self.ranked, keep, strict=True)
        ]

    def prove(self, keep: Sequence[int], on_unverified: OnUnverified = "pin") -> SlicePlan:
        """Return the largest proven cut that keeps at least as many channels of each family.

        Raises:
            StageFailed: a family's cut is refused, and that is an error.
        """
        pinned, wanted = dict(self.pinned), []
        for one, channels in zip(self.ranked, self.removed(keep), strict=True):
            if channels:
                wanted.append(GroupSlice(one.family, channels))
            else:
                pinned[one.family.name] = f"all of its {len(one.scores)} channels are to stay"
        cut = prove(self.module, wanted, pinned, self.graph, self.proof)
        proven = {found.group.name for found in cut.groups}
        refused = [name for name in (w.group.name for w in wanted) if name not in proven]
        if refused and on_unverified == "error":
            raise StageFailed(
                f"the cut of {refused[0]!r} cannot be proven: {cut.pinned[refused[0]]}; exclude "
                "it, or set on_unverified: pin"
            )
        return cut

    def without(self, names: set[str], reasons: Mapping[str, str]) -> Ranking:
        """Return the ranking of the other families; those that leave it are pinned."""
        left = tuple(one for one in self.ranked if one.family.name not in names)
        pinned = {**self.pinned, **{name: reasons[name] for name in names}}
        return Ranking(self.module, self.graph, left, pinned, self.comparable, self.proof)


def rank(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    importance: Criterion = "l2",
    *,
    others: Sequence[Sequence[torch.Tensor]] = (),
    real: Sequence[torch.Tensor] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    originals: Originals | None = None,
    batches: Sequence[Batch] = (),
    device: str = "cpu",
    seed: int = 0,
    loss: Loss = INFERRED_LOSS,
) -> Ranking:
    """Return a module's families with a score for each channel; the module is not changed.

    Args:
        module: a module in eval mode.
        inputs: what its forward takes.
        importance: how channels are ranked.
        others: inputs of other sizes, at which cuts are proven too.
        real: a batch of real samples, on which cuts are proven first.
        include: patterns of module names; where there are any, only their channels may leave.
        exclude: patterns of module names whose channels stay: those that a layer makes, and those
            that a normalisation or scale is applied to.
        originals: how many channels families had before the first of several cuts.
        batches: calibration samples, for the criteria that look at activations or gradients.
        device: where those are run.
        seed: of what is drawn at random.
        loss: for the criteria that look at gradients.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the module cannot be traced, or does not take the samples.
    """
    included = modules_excluded(module, include, "prune_channels.include")
    excluded = modules_excluded(module, exclude)
    graph = trace(module, inputs)
    pinned, chosen = dict(graph.pinned), []
    for family in graph.groups:
        reason = _not_chosen(family, included if include else None, excluded)
        if reason:
            pinned[family.name] = reason
        else:
            chosen.append(family)
    scores = score_families(
        module, chosen, graph, importance, batches=batches, device=device, seed=seed, loss=loss
    )
    ranked = []
    for family, found in zip(chosen, scores, strict=True):
        if isinstance(found, str):
            pinned[family.name] = found
        else:
            original = (originals or {}).get(family.slots, len(found))
            kind = structure_of(module, family, graph)
            ranked.append(Ranked(family, found, entries_of(family, graph), original, kind))
    comparable, proof = importance in COMPARABLE, MaskedEquivalence(module, inputs, others, real)
    return Ranking(module, graph, tuple(ranked), pinned, comparable, proof)


def plan_cut(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    ratio: float,
    importance: Criterion = "l2",
    round_to: int = 16,
    exclude: Sequence[str] = (),
    seed: int = 0,
) -> SlicePlan:
    """Return a cut that was proven, family by family and as a whole; the module is not changed.

    Args:
        module: a module in eval mode.
        inputs: what its forward takes.
        ratio: fraction of each family's channels to remove.
        importance: how channels are ranked, by weights alone.
        round_to: channels kept are a multiple of this, or of a smaller one in narrow families.
        exclude: patterns of module names whose channels stay.
        seed: seed of random importance.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the module cannot be traced.
    """
    ranking = rank(module, inputs, importance, exclude=exclude, seed=seed)
    return ranking.prove(ranking.allocate(ratio, Limits(round_to=round_to)))


def entries_of(family: ChannelGroup, graph: AxisGraph) -> int:
    """Return the places one channel takes along the axis where it takes fewest."""
    return min(graph.entries(slot, family.channels[0]) for slot in family.slots)


def structure_of(module: nn.Module, family: ChannelGroup, graph: AxisGraph) -> Hashable:
    """Return what families of the same structure have in common: layers, axes, never widths."""
    modules = dict(module.named_modules())
    parts = []
    for tensor, axis in family.slots:
        owner, _, short = tensor.rpartition(".")
        entries = graph.entries((tensor, axis), family.channels[0])
        parts.append((type(modules[owner]).__name__, short, axis, entries))
    return tuple(sorted(set(parts)))


def modules_excluded(
    module: nn.Module, patterns: Sequence[str], setting: str = "prune_channels.exclude"
) -> dict[str, str]:
    """Return the modules that patterns name, with all inside them → the pattern.

    Raises:
        PipelineInvalid: a pattern matches none; the message names close matches.
    """
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3) or names[:3]
            raise PipelineInvalid(
                f"{setting}: no module matches {pattern!r}; "
                f"did you mean {', '.join(map(repr, close))}?"
            )
        for name in names:
            if any(name == m or name.startswith(f"{m}.") for m in matched):
                found.setdefault(name, pattern)
    return found


def _not_chosen(
    family: ChannelGroup, included: Mapping[str, str] | None, excluded: Mapping[str, str]
) -> str | None:
    """Return why the user's patterns keep a family, or None."""
    held_by = [excluded[name] for name in family.owners if name in excluded]
    if held_by:
        return f"excluded by {held_by[0]!r}"
    if included is not None and not any(name in included for name in family.producers):
        return "not among those that `include` names"
    return None
