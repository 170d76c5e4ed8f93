"""Replace modules that cannot be sliced by equivalent ones that can."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from compress.artifacts.edits.split_attention import is_splittable
from compress.artifacts.recipe import NameSizes, SplitAttention
from compress.pruning.verification.masked_equivalence import MaskedEquivalence
from compress.pruning.verification.module_rewrites import name_sizes_

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn

    from compress.artifacts.recipe import AnyEdit
    from compress.pruning.dependency.channel_groups import SlicePlan


log = logging.getLogger(__name__)


def rewrite_(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    real: Sequence[torch.Tensor] | None = None,
    others: Sequence[Sequence[torch.Tensor]] = (),
    *,
    across_norms: bool = False,
) -> tuple[AnyEdit, ...]:
    """Make more of a module's channels removable, in place, and return the edits that did.

    Each ``nn.MultiheadAttention`` is replaced by a
    :class:`~compress.artifacts.edits.split_attention.SplitMultiheadAttention`, and sizes that the
    code of modules computes become attributes where that lets channels be removed, if the module's
    outputs stay the same on seeded inputs, on ``others`` of other sizes and on a batch of real
    samples.
    """
    edits = _split_attention_(module, inputs, real)
    return (*edits, *name_sizes_(module, inputs, real, others, across_norms=across_norms))


def _split_attention_(
    module: nn.Module, inputs: Sequence[torch.Tensor], real: Sequence[torch.Tensor] | None
) -> tuple[AnyEdit, ...]:
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
    equivalence = MaskedEquivalence(module, inputs, real=real)
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
        else:
            needed.append(edit)
    return tuple(needed)


def _is_sliced(module: str, plan: SlicePlan) -> bool:
    return not module or any(name.startswith(f"{module}.") for name in plan.kept)
