"""Which channels go: how many of each family, the least important first, each cut proven."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import floor, gcd
from typing import TYPE_CHECKING

import torch

from compress.core.errors import PipelineInvalid
from compress.pruning.attributes import attribute_changes
from compress.pruning.axis_graph import trace
from compress.pruning.importance import Criterion, channel_importance
from compress.pruning.proof import Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compress.pruning.families import AxisGraph, Family, Kept


@dataclass(frozen=True)
class FamilyCut:
    """The channels that leave one family."""

    family: Family
    removed: tuple[int, ...]
    attributes: dict[str, int] = field(default_factory=dict)
    """Dotted attribute → value that goes with the cut."""

    @property
    def before(self) -> int:
        """Channels before the cut."""
        return len(self.family.channels)

    @property
    def after(self) -> int:
        """Channels after the cut."""
        return self.before - len(self.removed)


@dataclass(frozen=True)
class ChannelCut:
    """A proven cut of a whole module, and what was left alone and why."""

    kept: Kept
    attributes: dict[str, int]
    families: tuple[FamilyCut, ...]
    pinned: dict[str, str]
    """Module whose channels stay → why."""


def plan_cut(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    ratio: float,
    importance: Criterion = "l2",
    round_to: int = 16,
    exclude: Sequence[str] = (),
    seed: int = 0,
) -> ChannelCut:
    """Return a cut that was proven, family by family and as a whole; the module is not changed.

    Args:
        module: a module in eval mode.
        inputs: what its forward takes.
        ratio: fraction of each family's channels to remove.
        importance: how channels are ranked.
        round_to: channels kept are a multiple of this, or of a smaller one in narrow families.
        exclude: patterns of module names whose channels stay: those that a layer makes, and those
            that a normalisation or scale is applied to.
        seed: seed of random importance.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the module cannot be traced.
    """
    excluded = modules_excluded(module, exclude)
    graph = trace(module, inputs)
    proof = Proof(module, inputs)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    generator = torch.Generator().manual_seed(seed)
    pinned, proven = dict(graph.pinned), []
    for family in graph.families:
        scores = channel_importance(family, graph, parameters, importance, generator)
        keep = channels_kept(len(scores), entries_of(family, graph), ratio, round_to)
        removed = [family.channels[i] for i in scores.argsort(stable=True)[: len(scores) - keep]]
        held_by = [excluded[name] for name in family.holders if name in excluded]
        if held_by:
            pinned[family.name] = f"excluded by {held_by[0]!r}"
        elif not removed:
            pinned[family.name] = f"{ratio:g} of {len(scores)} rounds to none of its channels"
        else:
            cut = _prove_alone(module, FamilyCut(family, tuple(removed)), graph, proof)
            if isinstance(cut, str):
                pinned[family.name] = cut
            else:
                proven.append(cut)
    return _prove_together(proven, pinned, graph, proof)


def channels_kept(count: int, entries: int, ratio: float, round_to: int) -> int:
    """Return how many channels stay: the nearest multiple, never none.

    Runtimes compute in blocks of channels: ONNX Runtime's convolutions on CPU in 16. A family that
    is narrower than two multiples is rounded to a half, a quarter … of it, so that it is still cut.

    Args:
        count: channels in the family.
        entries: places that one channel takes along an axis, like a head's width.
        ratio: fraction to remove.
        round_to: multiple that the axis should have.
    """
    unit = round_to // gcd(round_to, entries)
    while unit > 1 and count < 2 * unit:
        unit //= 2
    nearest = floor((1 - ratio) * count / unit + 0.5) * unit
    return min(count, max(unit, nearest))


def entries_of(family: Family, graph: AxisGraph) -> int:
    """Return the places one channel takes along the axis where it takes fewest."""
    return min(graph.entries(slot, family.channels[0]) for slot in family.slots)


def modules_excluded(module: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """Return the modules that patterns name, with all inside them → the pattern.

    Raises:
        PipelineInvalid: a pattern matches none; the message names close matches.
    """
    names = [name for name, _ in module.named_modules() if name]
    excluded: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3) or names[:3]
            raise PipelineInvalid(
                f"prune_channels.exclude: no module matches {pattern!r}; "
                f"did you mean {', '.join(map(repr, close))}?"
            )
        for name in names:
            if any(name == m or name.startswith(f"{m}.") for m in matched):
                excluded.setdefault(name, pattern)
    return excluded


def _prove_alone(
    module: nn.Module, cut: FamilyCut, graph: AxisGraph, proof: Proof
) -> FamilyCut | str:
    """Return the cut with the attributes that must change, or why it cannot be made."""
    kept = graph.kept(cut.removed)
    first_reason = None
    for attributes in attribute_changes(module, cut.family, graph, cut.removed):
        reason = proof.refute(kept, attributes)
        if reason is None:
            return FamilyCut(cut.family, cut.removed, attributes)
        first_reason = first_reason or reason
    return str(first_reason)


def _prove_together(
    cuts: list[FamilyCut], pinned: dict[str, str], graph: AxisGraph, proof: Proof
) -> ChannelCut:
    """Return the whole cut; should families disagree, those that can be joined one by one."""
    whole = _whole(cuts, pinned, graph)
    if not cuts or proof.refute(whole.kept, whole.attributes) is None:
        return whole
    joined: list[FamilyCut] = []
    for cut in cuts:
        larger = _whole([*joined, cut], pinned, graph)
        reason = proof.refute(larger.kept, larger.attributes)
        if reason is None:
            joined.append(cut)
        else:
            pinned[cut.family.name] = f"together with other cuts, {reason}"
    return _whole(joined, pinned, graph)


def _whole(cuts: list[FamilyCut], pinned: dict[str, str], graph: AxisGraph) -> ChannelCut:
    attributes = {name: value for cut in cuts for name, value in cut.attributes.items()}
    kept = graph.kept(channel for cut in cuts for channel in cut.removed)
    return ChannelCut(kept, attributes, tuple(cuts), pinned)
