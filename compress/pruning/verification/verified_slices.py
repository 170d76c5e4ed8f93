"""From the cuts that are wanted to those that are proven.

All of them are proven in one comparison; only where that is refuted are they halved, down to the
single families that are at fault. A module of n families of which k cannot be cut costs about
k · log₂ n comparisons instead of n.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compress.pruning.dependency.attribute_reads import place_of
from compress.pruning.dependency.group_slices import SlicePlan, joined
from compress.pruning.dependency.module_attributes import (
    all_changes,
    certain_changes,
    combined,
    possible_changes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup
    from compress.pruning.dependency.group_slices import Change, GroupSlice
    from compress.pruning.verification.masked_equivalence import MaskedEquivalence


def prove(
    module: nn.Module,
    wanted: Sequence[GroupSlice],
    pinned: Mapping[str, str],
    graph: AxisGraph,
    proof: MaskedEquivalence,
) -> SlicePlan:
    """Return a cut that is proven as a whole, and why each family that is not in it stays.

    Args:
        module: the module, which is not changed.
        wanted: the channels that should leave each family.
        pinned: module → why its channels stay, known before.
        graph: the module's axis graph.
        proof: what compares cuts with their masked twins.
    """
    found = _proven(module, wanted, pinned, graph, proof)
    # Both are slow to find out, and seldom so: asked of the whole cut first.
    if found.groups and proof.untrainable(found.kept, found.attributes) is not None:
        proof.must_train = True
        found = _proven(module, wanted, pinned, graph, proof)
    # An attribute may matter to tracing alone, which takes other paths through a model's code.
    if found.groups and proof.untraced(found.kept, found.attributes) is not None:
        proof.must_trace = True
        found = _proven(module, wanted, pinned, graph, proof)
    return found


def _proven(
    module: nn.Module,
    wanted: Sequence[GroupSlice],
    pinned: Mapping[str, str],
    graph: AxisGraph,
    proof: MaskedEquivalence,
) -> SlicePlan:
    search = _Search(module, graph, proof)
    cuts = [replace(c, changes=certain_changes(module, c.group, graph)) for c in wanted]
    proven = search.largest(cuts) if cuts else []
    proven = search.with_companions(proven, cuts)
    order = {cut.group: place for place, cut in enumerate(wanted)}
    proven.sort(key=lambda cut: order[cut.group])
    refused = {family.name: reason for family, reason in reversed(search.refused.items())}
    return joined(proven, {**pinned, **refused}, graph)


class _Search:
    """Finds cuts that are right together."""

    def __init__(self, module: nn.Module, graph: AxisGraph, proof: MaskedEquivalence) -> None:
        self.refused: dict[ChannelGroup, str] = {}
        """Family → why it stays."""
        self._module = module
        self._graph = graph
        self._proof = proof

    def largest(self, cuts: Sequence[GroupSlice]) -> list[GroupSlice]:
        """Return those of some cuts that are right, proven together."""
        if len(cuts) == 1:
            return self._alone(cuts[0])
        if self._refuted(cuts) is None:
            return list(cuts)
        half = len(cuts) // 2
        left, right = self.largest(cuts[:half]), self.largest(cuts[half:])
        return self._extended(left, right) if left and right else left or right

    def with_companions(
        self, proven: list[GroupSlice], cuts: Sequence[GroupSlice]
    ) -> list[GroupSlice]:
        """Return a proven set with those refused alone that are right together.

        Modules may share a configuration that says how wide all of them are, or, as those of T5's
        decoder do, a tensor that one of them makes as wide as itself.
        """
        refused = [cut for cut in cuts if cut.group in self.refused]
        for group in self._companions(refused):
            for more in self._changed_alike(group):
                if self._refuted([*proven, *more]) is None:
                    for cut in more:
                        del self.refused[cut.group]
                    return self.with_companions([*proven, *more], cuts)
        return proven

    def _companions(self, refused: Sequence[GroupSlice]) -> list[list[GroupSlice]]:
        """Return families that share an attribute, and those of one kind of module."""
        modules = dict(self._module.named_modules())
        groups: dict[object, list[GroupSlice]] = {}
        for cut in refused:
            places = {place_of(self._module, c.attribute) for c in self._read_changes(cut)}
            owners = (name.rpartition(".")[0] for name in cut.group.producers)
            kind = (*(type(modules[name]) for name in owners), cut.before, cut.after)
            for key in (*sorted(places), kind):
                groups.setdefault(key, []).append(cut)
        return [group for group in groups.values() if len(group) > 1]

    def _changed_alike(self, cuts: Sequence[GroupSlice]) -> Iterator[list[GroupSlice]]:
        """Yield the cuts with sets of changes, of attributes of the same names in all of them."""
        read = (_short(change) for cut in cuts for change in self._read_changes(cut))
        for names in combined(list(dict.fromkeys(read))):
            yield [
                replace(
                    cut,
                    changes=(*cut.changes, *(c for c in self._changes(cut) if _short(c) in names)),
                )
                for cut in cuts
            ]

    def _changes(self, cut: GroupSlice) -> tuple[Change, ...]:
        return all_changes(self._module, cut.group, self._graph, cut.removed)

    def _read_changes(self, cut: GroupSlice) -> list[Change]:
        return [c for c in self._changes(cut) if self._proof.is_read(c.attribute)]

    def _extended(self, base: list[GroupSlice], more: Sequence[GroupSlice]) -> list[GroupSlice]:
        """Return a proven set with those of another set that are right beside it."""
        reason = self._refuted([*base, *more])
        if reason is None:
            return [*base, *more]
        if len(more) == 1:
            self.refused[more[0].group] = f"together with other cuts, {reason}"
            return base
        half = len(more) // 2
        return self._extended(self._extended(base, more[:half]), more[half:])

    def _alone(self, cut: GroupSlice) -> list[GroupSlice]:
        """Return a cut with the attributes that must change, or nothing if it is wrong."""
        first_reason = None
        found = possible_changes(
            self._module, cut.group, self._graph, cut.removed, self._proof.is_read
        )
        for changes in found:
            changed = replace(cut, changes=(*cut.changes, *changes))
            reason = self._refuted([changed])
            if reason is None:
                return [changed]
            first_reason = first_reason or reason
        self.refused[cut.group] = str(first_reason)
        return []

    def _refuted(self, cuts: Sequence[GroupSlice]) -> str | None:
        whole = joined(cuts, {}, self._graph)
        return self._proof.find_mismatch(whole.kept, whole.attributes)


def _short(change: Change) -> str:
    return change.attribute.rpartition(".")[2]
