"""Replace modules that cannot be sliced by equivalent ones that can."""

from __future__ import annotations

import ast
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from compress.artifacts.edits.named_sizes import NamedCall, occurrence_of, sizes_of
from compress.artifacts.edits.split_attention import is_splittable
from compress.artifacts.recipe import AnyEdit, NameSizes, SplitAttention
from compress.common.forward import copy_module, run_in_eval
from compress.pruning.dependency.channel_groups import GroupSlice, SizedCallRecorder
from compress.pruning.verification.masked_equivalence import (
    MaskedEquivalence,
    VerificationInputs,
    verify_slices,
)

if TYPE_CHECKING:
    from torch import nn

    from compress.pruning.dependency.channel_groups import (
        AxisGraph,
        ChannelGroup,
        SizedAxis,
        SlicePlan,
    )

log = logging.getLogger(__name__)


def rewrite_(module: nn.Module, inputs: VerificationInputs) -> tuple[AnyEdit, ...]:
    """Make more of a module's channels removable, in place, and return the edits that did.

    Each ``nn.MultiheadAttention`` is replaced by a
    :class:`~compress.artifacts.edits.split_attention.SplitMultiheadAttention`, and sizes that the
    code of modules computes become attributes where that lets channels be removed, if the module's
    outputs stay the same on all inputs.
    """
    return (*_split_attention_(module, inputs), *_name_sizes_(module, inputs))


def _split_attention_(module: nn.Module, inputs: VerificationInputs) -> tuple[AnyEdit, ...]:
    """Replace torch's own attention, in place."""
    parameters = [p for part in module.modules() for p in part._parameters.values()]
    holders = Counter(id(parameter) for parameter in parameters)
    names = [
        name
        for name, part in module.named_modules()
        if name
        and is_splittable(part)
        # Splitting copies, so it would untie a weight that another module holds too.
        and all(holders[id(p)] == 1 for p in part._parameters.values() if p is not None)
    ]
    if not names:
        return ()
    equivalence = MaskedEquivalence(module, VerificationInputs(inputs.seeded, real=inputs.real))
    edit = SplitAttention(modules=tuple(names))
    if equivalence.find_change_mismatch(edit.apply_) is not None:
        verified = []
        for name in names:
            alone = SplitAttention(modules=(name,))
            reason = equivalence.find_change_mismatch(alone.apply_)
            if reason is None:
                verified.append(name)
            else:
                log.info("%s keeps its heads: with separate projections, %s", name, reason)
        edit = SplitAttention(modules=tuple(verified))
        if not verified or equivalence.find_change_mismatch(edit.apply_) is not None:
            return ()
    edit.apply_(module)
    return (edit,)


def edits_needed(edits: Iterable[AnyEdit], plan: SlicePlan) -> tuple[AnyEdit, ...]:
    """Return the edits that a plan requires, without those of modules that it does not slice."""
    needed: list[AnyEdit] = []
    for edit in edits:
        if isinstance(edit, SplitAttention):
            modules = tuple(name for name in edit.modules if _is_sliced(name, plan))
            needed += [SplitAttention(modules=modules)] if modules else []
        elif isinstance(edit, NameSizes):
            sizes = {name: own for name, own in edit.sizes.items() if _is_sliced(name, plan)}
            needed += [NameSizes(calls=edit.calls, sizes=sizes)] if sizes else []
    return tuple(needed)


def _is_sliced(module: str, plan: SlicePlan) -> bool:
    return not module or any(name.startswith(f"{module}.") for name in plan.kept)


def _name_sizes_(module: nn.Module, inputs: VerificationInputs) -> tuple[NameSizes, ...]:
    """Make attributes of sizes in the code of modules, in place, where that lets channels leave."""
    if not _writes_sizes(module, inputs.seeded):
        return ()
    # A size may have the batch in it, as that of `x.view(n * c // 2, 2)` has.
    longer = [torch.cat([x, x[:1]]) if x.dim() else x for x in inputs.seeded]
    inputs = replace(inputs, others=[*inputs.others, longer])
    graph = inputs.trace(module)
    near = {
        group: {size.call.module for size in graph.sized if _is_near(size, group)}
        for group in graph.groups
    }
    equivalence = MaskedEquivalence(module, inputs)
    refused = _refused(module, [group for group in near if near[group]], graph, equivalence)
    owners = {owner for group in refused for owner in near[group]}
    # The width of a head must not follow from that of another tensor either. But a table of
    # positions has channels, too, along an axis whose size is that of the input.
    own = [size for size in graph.sized if size.call.module in owners]
    for sizes in (own, [size for size in own if size.counted is not None]):
        edits = _naming(module, sizes)
        if not edits or equivalence.find_change_mismatch(partial(_apply_, edits)) is not None:
            continue
        named = copy_module(module)
        _apply_(edits, named)
        again = inputs.trace(named)
        wanted = {group.slots for group in refused}
        groups = [group for group in again.groups if group.slots in wanted]
        proof = MaskedEquivalence(named, inputs)
        if len(_refused(named, groups, again, proof)) < len(refused):
            _apply_(edits, module)
            return edits
    return ()


def _writes_sizes(module: nn.Module, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether methods of a module write sizes that are neither -1 nor attributes."""
    recorder = SizedCallRecorder(module)
    with suppress(Exception), recorder:  # what a forward raises is found where it matters
        run_in_eval(module, inputs)
    return any(
        call.attribute(index) is None and ast.unparse(size) != "-1"
        for call in recorder.calls
        for index, size in enumerate(sizes_of(call.call) or ())
    )


def _is_near(size: SizedAxis, group: ChannelGroup) -> bool:
    """Whether a size may count a group's channels: those of its axis, or of layers beside it."""
    inside = f"{size.call.module}." if size.call.module else ""
    is_own = size.counted is not None and bool(
        torch.isin(size.counted, torch.tensor(group.channels)).any()
    )
    return is_own or any(tensor.startswith(inside) for tensor, _ in group.slots)


def _refused(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    equivalence: MaskedEquivalence,
) -> list[ChannelGroup]:
    """Return the groups of which some channels cannot be removed."""
    # Not a half: two parts of an axis may happen to stay equally wide.
    wanted = [
        GroupSlice(group, group.channels[: max(1, len(group.channels) // 3)]) for group in groups
    ]
    plan = verify_slices(module, wanted, {}, graph, equivalence)
    verified = {one.group for one in plan.groups}
    return [group for group in groups if group not in verified]


def _naming(module: nn.Module, sizes: Sequence[SizedAxis]) -> tuple[NameSizes, ...]:
    """Return the edits, one for each class of modules, that make attributes of some sizes."""
    modules = dict(module.named_modules())
    by_class: dict[type, list[SizedAxis]] = {}
    for size in sizes:
        if size.call.attribute(size.index) not in getattr(size.call.kind, "named_sizes", ()):
            by_class.setdefault(size.call.kind, []).append(size)
    edits = []
    for own in by_class.values():
        names: dict[tuple[str, str, int], dict[int, str]] = {}
        values: dict[str, dict[str, int | tuple[int, ...]]] = {}
        for size in own:
            call = size.call
            kind = "slice"
            if isinstance(call.call, ast.Call):
                kind = ast.unparse(call.call.func).rpartition(".")[2]
            attributes = names.setdefault((call.method, *occurrence_of(call.call, call.tree)), {})
            taken = sum(map(len, names.values()))
            while size.index not in attributes:
                name = f"{kind}_size{'s' * isinstance(size.value, tuple)}_{taken}"
                is_free = all(not hasattr(modules[other.call.module], name) for other in own)
                attributes |= {size.index: name} if is_free else {}
                taken += 1
            values.setdefault(call.module, {})[attributes[size.index]] = size.value
        calls = tuple(
            NamedCall(method=method, source=source, occurrence=number, attributes=attributes)
            for (method, source, number), attributes in names.items()
        )
        every = {name for attributes in names.values() for name in attributes.values()}
        # A module in which a call did not run has no value to give.
        complete = {name: found for name, found in values.items() if set(found) == every}
        edits.append(NameSizes(calls=calls, sizes=complete))
    return tuple(edit for edit in edits if edit.sizes)


def _apply_(edits: Iterable[NameSizes], module: nn.Module) -> None:
    for edit in edits:
        edit.apply_(module)
