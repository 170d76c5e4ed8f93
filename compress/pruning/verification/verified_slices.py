"""Find the largest set of group slices that are verified together.

All wanted slices are compared at once with their masked twin; only if that fails, the set is
halved, down to the single groups at fault. A module of n groups of which k cannot be sliced costs
about k · log₂ n comparisons instead of n.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from compress.pruning.dependency.channel_groups import SlicePlan
from compress.pruning.dependency.module_attributes import (
    all_changes,
    attribute_key,
    certain_changes,
    combined,
    possible_changes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from compress.pruning.dependency.channel_groups import (
        AxisGraph,
        Change,
        ChannelGroup,
        GroupSlice,
    )
    from compress.pruning.verification.masked_equivalence import MaskedEquivalence


def verify_slices(
    module: nn.Module,
    wanted: Sequence[GroupSlice],
    pinned: Mapping[str, str],
    graph: AxisGraph,
    equivalence: MaskedEquivalence,
) -> SlicePlan:
    """Return the wanted slices that are verified together, and why the other groups stay.

    ``pinned`` gives the modules whose channels stay, known before, and why.
    """
    wanted = [replace(c, changes=certain_changes(module, c.group, graph)) for c in wanted]
    plan = _VerifiedSetSearch(module, wanted, graph, equivalence).run(pinned)
    # Both checks are slow and seldom fail, so they are first made of the whole plan. An attribute
    # may matter to tracing alone, which takes other paths through a model's code.
    if plan.groups and equivalence.untrainable(plan.kept, plan.attributes) is not None:
        equivalence.must_train = True
        plan = _VerifiedSetSearch(module, wanted, graph, equivalence).run(pinned)
    if plan.groups and equivalence.untraced(plan.kept, plan.attributes) is not None:
        equivalence.must_trace = True
        plan = _VerifiedSetSearch(module, wanted, graph, equivalence).run(pinned)
    return plan


@dataclass
class _VerifiedSetSearch:
    """Bisects a set of slices into those that are verified together and those refused."""

    _module: nn.Module
    _wanted: Sequence[GroupSlice]
    _graph: AxisGraph
    _equivalence: MaskedEquivalence
    _refused: dict[ChannelGroup, str] = field(default_factory=dict)
    """Group → why it stays."""

    def run(self, pinned: Mapping[str, str]) -> SlicePlan:
        """Search, and return the plan of the verified slices in the order of the wanted ones."""
        verified = self._largest_verified(self._wanted) if self._wanted else []
        if self._refused:
            verified = self._with_dependents(verified)
        order = {one.group: i for i, one in enumerate(self._wanted)}
        verified.sort(key=lambda one: order[one.group])
        refused = {group.name: reason for group, reason in reversed(self._refused.items())}
        return SlicePlan.combine(verified, {**pinned, **refused}, self._graph)

    def _largest_verified(self, slices: Sequence[GroupSlice]) -> list[GroupSlice]:
        """Return a verified subset, by bisection."""
        if len(slices) > 1:
            if self._mismatch(slices) is None:
                return list(slices)
            half = len(slices) // 2
            left = self._largest_verified(slices[:half])
            right = self._largest_verified(slices[half:])
            return self._extended(left, right) if left and right else left or right
        # A slice alone is verified with the attributes that must change with it.
        (one,), first_reason = slices, None
        for changes in possible_changes(
            self._module, one.group, self._graph, one.removed, self._equivalence.is_read
        ):
            changed = replace(one, changes=(*one.changes, *changes))
            reason = self._mismatch([changed])
            if reason is None:
                return [changed]
            first_reason = first_reason or reason
        self._refused[one.group] = str(first_reason)
        return []

    def _extended(self, base: list[GroupSlice], more: Sequence[GroupSlice]) -> list[GroupSlice]:
        """Return a verified set, extended by those of another that are verified with it."""
        reason = self._mismatch([*base, *more])
        if reason is None:
            return [*base, *more]
        if len(more) == 1:
            self._refused[more[0].group] = f"together with other cuts, {reason}"
            return base
        half = len(more) // 2
        return self._extended(self._extended(base, more[:half]), more[half:])

    def _with_dependents(self, verified: list[GroupSlice]) -> list[GroupSlice]:
        """Add sets of slices that are wrong alone but right together."""
        # Modules may share a configuration that says how wide all of them are, or, as those of T5's
        # decoder do, a tensor that one of them makes as wide as itself. So slices that share an
        # attribute, or are of modules of the same classes, are tried together.
        modules = dict(self._module.named_modules())
        slices_of: dict[object, list[GroupSlice]] = {}
        for one in self._wanted:
            if one.group in self._refused:
                keys = {attribute_key(self._module, c.attribute) for c in self._read_changes(one)}
                owners = (name.rpartition(".")[0] for name in one.group.producer_modules)
                kind = (*(type(modules[name]) for name in owners), one.before, one.after)
                for key in (*sorted(keys), kind):
                    slices_of.setdefault(key, []).append(one)
        for candidates in filter(lambda slices: len(slices) > 1, slices_of.values()):
            for more in self._with_same_changes(candidates):
                if self._mismatch([*verified, *more]) is None:
                    for one in more:
                        del self._refused[one.group]
                    return self._with_dependents([*verified, *more])
        return verified

    def _with_same_changes(self, slices: Sequence[GroupSlice]) -> Iterator[list[GroupSlice]]:
        """Yield the slices with changes of attributes that have the same names in all of them."""
        read = (_last_name(change) for one in slices for change in self._read_changes(one))
        for names in combined(list(dict.fromkeys(read))):
            changed = []
            for one in slices:
                more = (c for c in self._all_changes(one) if _last_name(c) in names)
                changed.append(replace(one, changes=(*one.changes, *more)))
            yield changed

    def _all_changes(self, one: GroupSlice) -> tuple[Change, ...]:
        return all_changes(self._module, one.group, self._graph, one.removed)

    def _read_changes(self, one: GroupSlice) -> list[Change]:
        return [c for c in self._all_changes(one) if self._equivalence.is_read(c.attribute)]

    def _mismatch(self, slices: Sequence[GroupSlice]) -> str | None:
        plan = SlicePlan.combine(slices, {}, self._graph)
        return self._equivalence.find_mismatch(plan.kept, plan.attributes)


def _last_name(change: Change) -> str:
    return change.attribute.rpartition(".")[2]
