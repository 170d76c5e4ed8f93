"""Rank the channels of all groups of a module, and plan verified slices of the least important."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeAlias

from compress.common.errors import PipelineInvalid, StageFailed
from compress.pruning.allocation.ratios import RankedGroup, allocate
from compress.pruning.channel_settings import COMPARABLE, ChannelSelection
from compress.pruning.dependency.channel_groups import GroupSlice
from compress.pruning.importance.scores import score_groups
from compress.pruning.verification.masked_equivalence import MaskedEquivalence
from compress.pruning.verification.verified_slices import verify_slices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from compress.pruning.dependency.channel_groups import AxisGraph, SlicePlan
    from compress.pruning.dependency.rules.channel_labels import Slot
    from compress.pruning.importance.scores import ScoringSamples
    from compress.pruning.verification.verification_inputs import VerificationInputs

OnUnverified: TypeAlias = Literal["pin", "error"]


@dataclass(frozen=True)
class Ranking:
    """A module's channel groups with a score for each channel, from which slices are planned."""

    module: nn.Module
    graph: AxisGraph
    ranked: tuple[RankedGroup, ...]
    pinned: Mapping[str, str]
    """Module → why its channels stay, known before any slice."""
    comparable: bool
    """Whether scores of different groups can be compared."""
    equivalence: MaskedEquivalence

    def allocate(self, ratio: float, selection: ChannelSelection) -> list[int]:
        """Compute how many channels of each group stay."""
        return allocate(self.ranked, ratio, selection, comparable=self.comparable)

    def counts_for(self, widths: Mapping[str, int], share: float = 1.0) -> list[int]:
        """Return how many channels of each group stay on a share of the way to some widths.

        Raises:
            PipelineInvalid: no group has such a name, or it has fewer channels.
        """
        names = [one.group.name for one in self.ranked]
        for name, width in widths.items():
            if name not in names:
                close = difflib.get_close_matches(name, names, n=3) or names[:3]
                why = self.pinned.get(name)
                raise PipelineInvalid(
                    f"prune_channels.widths: the channels of {name!r} stay: {why}"
                    if why
                    else f"prune_channels.widths: no group of channels is named {name!r}; "
                    f"did you mean {', '.join(map(repr, close))}?"
                )
            most = self.ranked[names.index(name)].original
            if width > most:
                raise PipelineInvalid(
                    f"prune_channels.widths: {name!r} has {most} channels, found {width}"
                )
        return [
            min(len(one.scores), round(one.original - share * (one.original - width)))
            for one in self.ranked
            for width in [widths.get(one.group.name, one.original)]
        ]

    def removed(self, keep: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the least important channels of each group, all but ``keep`` of them."""
        # A stable sort, so that equal scores give the same channels everywhere.
        return [
            tuple(
                one.group.channels[i]
                for i in one.scores.argsort(stable=True)[: len(one.scores) - count].tolist()
            )
            for one, count in zip(self.ranked, keep, strict=True)
        ]

    def verify(self, keep: Sequence[int], on_unverified: OnUnverified = "pin") -> SlicePlan:
        """Return the largest verified plan that keeps at least ``keep`` channels of each group.

        Raises:
            StageFailed: a group's slice is not verified and ``on_unverified`` is ``"error"``.
        """
        pinned, wanted = dict(self.pinned), []
        for one, channels in zip(self.ranked, self.removed(keep), strict=True):
            if channels:
                wanted.append(GroupSlice(one.group, channels))
            else:
                pinned[one.group.name] = f"all of its {len(one.scores)} channels are to stay"
        plan = verify_slices(self.module, wanted, pinned, self.graph, self.equivalence)
        verified = {one.group for one in plan.groups}
        unverified = [one.group.name for one in wanted if one.group not in verified]
        if unverified and on_unverified == "error":
            raise StageFailed(
                f"the slice of {unverified[0]!r} cannot be verified: {plan.pinned[unverified[0]]}; "
                "exclude it, or set on_unverified: pin"
            )
        return plan

    def without(self, names: set[str], reasons: Mapping[str, str]) -> Ranking:
        """Return the ranking without some groups, which are pinned instead."""
        others = tuple(one for one in self.ranked if one.group.name not in names)
        pinned = {**self.pinned, **{name: reasons[name] for name in names}}
        return replace(self, ranked=others, pinned=pinned)


def rank(
    module: nn.Module,
    inputs: VerificationInputs,
    selection: ChannelSelection | None = None,
    scoring: ScoringSamples | None = None,
    originals: Mapping[tuple[Slot, ...], int] | None = None,
) -> Ranking:
    """Trace a module's channel groups and score their channels; the module is not changed.

    Only channels of modules that ``selection.include`` matches, or none that those of ``exclude``
    output, normalise or scale, are removed. ``originals`` gives a group's channels before the first
    of several pruning steps, by its slots. See :func:`score_groups` for ``scoring``.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the module cannot be traced, or does not take the samples.
    """
    selection = selection or ChannelSelection()
    included = modules_matching(module, selection.include, "prune_channels.include")
    excluded = modules_matching(module, selection.exclude)
    graph = inputs.trace(module)
    pinned, selected = dict(graph.pinned), []
    for group in graph.groups:
        excluded_by = [excluded[name] for name in group.owners if name in excluded]
        if excluded_by:
            pinned[group.name] = f"excluded by {excluded_by[0]!r}"
        elif selection.include and not any(name in included for name in group.producer_modules):
            pinned[group.name] = "not among those that `include` names"
        else:
            selected.append(group)
    scores = score_groups(module, selected, graph, selection.importance, scoring)
    ranked = []
    modules = dict(module.named_modules())
    for group, found in zip(selected, scores, strict=True):
        if isinstance(found, str):
            pinned[group.name] = found
        else:
            original = (originals or {}).get(group.slots, len(found))
            # Groups have the same structure if they lie along the same axes of the same kinds of
            # layers, whatever their widths.
            parts = set()
            for (tensor, axis), count in zip(group.slots, group.entries, strict=True):
                owner, _, short = tensor.rpartition(".")
                parts.add((type(modules[owner]).__name__, short, axis, count))
            structure = tuple(sorted(parts))
            ranked.append(RankedGroup(group, found, min(group.entries), original, structure))
    is_comparable, equivalence = (
        selection.importance in COMPARABLE,
        MaskedEquivalence(module, inputs),
    )
    return Ranking(module, graph, tuple(ranked), pinned, is_comparable, equivalence)


def modules_matching(
    module: nn.Module, patterns: Sequence[str], setting: str = "prune_channels.exclude"
) -> dict[str, str]:
    """Return the modules that patterns match, with all modules inside them → the pattern."""
    names = [name for name, _ in module.named_modules() if name]
    return names_matching(names, patterns, setting, "module")


def names_matching(
    names: Sequence[str], patterns: Sequence[str], setting: str, kind: str
) -> dict[str, str]:
    """Return the dotted names that patterns match, with all names below them → the pattern.

    Raises:
        PipelineInvalid: a pattern matches none; the message names close matches.
    """
    pattern_of: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3) or names[:3]
            raise PipelineInvalid(
                f"{setting}: no {kind} matches {pattern!r}; "
                f"did you mean {', '.join(map(repr, close))}?"
            )
        for name in names:
            if any(name == m or name.startswith(f"{m}.") for m in matched):
                pattern_of.setdefault(name, pattern)
    return pattern_of
