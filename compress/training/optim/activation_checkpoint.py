"""Activation checkpointing: recompute activations in the backward pass to save memory.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

import difflib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from compress.common.errors import StageFailed
from compress.training.optim.transformer_blocks import chosen_blocks

if TYPE_CHECKING:
    from torch import nn

    from compress.training.config.training import Training


def checkpoint_activations_(module: nn.Module, training: Training) -> None:
    """Wrap the forward of blocks in torch's checkpoint, in place; names of weights stay.

    To be called before sharding and DDP, whose hooks must not see the second forward pass.

    Raises:
        StageFailed: the model has no such blocks, or torch no such operators.
    """
    setting = training.activation_checkpointing
    if setting == "none":
        return
    blocks = chosen_blocks(module, training.activation_blocks, "activation_checkpointing")
    options: dict[str, Any] = {}
    if setting == "selective":
        saved = operators_with_prefix(training.activation_operators)
        options["context_fn"] = partial(
            create_selective_checkpoint_contexts, partial(_policy, saved)
        )
    for block in blocks[:: setting if isinstance(setting, int) else 1]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def operators_with_prefix(prefixes: tuple[str, ...]) -> frozenset[str]:
    """Return torch's ATen operators whose names start with a prefix, ignoring underscores.

    Raises:
        StageFailed: no operator starts with one of the prefixes.
    """
    names = {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    known = {name.removeprefix("aten::").lstrip("_"): name for name in sorted(names)}
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in known):
            near = difflib.get_close_matches(prefix, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StageFailed(f"activation_operators: torch has no {prefix!r}{hint}")
    return frozenset(n for n in names if n.removeprefix("aten::").lstrip("_").startswith(prefixes))


def _policy(
    saved: frozenset[str], context: object, operator: Any, *inputs: object, **named: object
) -> CheckpointPolicy:
    if operator.name().partition(".")[0] in saved:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
