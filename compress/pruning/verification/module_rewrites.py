"""Putting parts that can be cut in the place of parts that cannot, where the answers stay equal."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from compress.artifacts.edits.split_attention import is_splittable
from compress.artifacts.recipe import SplitAttention
from compress.pruning.verification.masked_equivalence import MaskedEquivalence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn

    from compress.artifacts.recipe import AnyEdit
    from compress.pruning.dependency.group_slices import SlicePlan


log = logging.getLogger(__name__)


def rewrite_(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    real: Sequence[torch.Tensor] | None = None,
) -> tuple[AnyEdit, ...]:
    """Make more of a module's channels cuttable, in place, and return the edits that did.

    Each ``nn.MultiheadAttention`` gives way to a
    :class:`~compress.artifacts.edits.split_attention.SplitMultiheadAttention` where the module
    answers as before.

    Args:
        module: a module in eval mode.
        inputs: seeded inputs that its forward takes.
        real: a batch of real samples, where there are any.
    """
    names = _attention(module)
    if not names:
        return ()
    proof = MaskedEquivalence(module, inputs, real=real)
    if _refuted(proof, names):
        reasons = {name: _refuted(proof, [name]) for name in names}
        for name, reason in reasons.items():
            if reason:
                log.info("%s keeps its heads: taken apart, %s", name, reason)
        names = [name for name, reason in reasons.items() if reason is None]
    edit = SplitAttention(modules=tuple(names))
    if not names or _refuted(proof, names):
        return ()
    edit.apply_(module)
    return (edit,)


def edits_needed(edits: Iterable[AnyEdit], cut: SlicePlan) -> tuple[AnyEdit, ...]:
    """Return the edits without which a cut cannot be made; of what is not cut none is needed."""
    needed: list[AnyEdit] = []
    for edit in edits:
        if not isinstance(edit, SplitAttention):
            needed.append(edit)
            continue
        modules = [m for m in edit.modules if any(name.startswith(f"{m}.") for name in cut.kept)]
        if modules:
            needed.append(SplitAttention(modules=tuple(modules)))
    return tuple(needed)


def _attention(module: nn.Module) -> list[str]:
    """Return the names of attention modules that can be taken apart; each module once."""
    holders: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        name
        for name, part in module.named_modules()
        if name
        and is_splittable(part)
        # Taking apart copies, so it would untie a weight that another module holds too.
        and all(holders[id(p)] == 1 for p in part._parameters.values() if p is not None)
    ]


def _refuted(proof: MaskedEquivalence, names: Sequence[str]) -> str | None:
    return proof.find_change_mismatch(SplitAttention(modules=tuple(names)).apply_)
