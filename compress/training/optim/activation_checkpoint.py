"""Activations computed again in the backward pass instead of being kept (Chen et al., 2016)."""

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
    """Let blocks forget their activations, in place; names of weights stay.

    Before sharding and DDP: their hooks then see one forward of each block, not the second.

    Raises:
        StageFailed: the model has no such blocks, or torch no such operators.
    """
    setting = training.activation_checkpointing
    if setting == "none":
        return
    blocks = chosen_blocks(module, training.activation_blocks, "activation_checkpointing")
    kept: dict[str, Any] = {}
    if setting == "selective":
        kept["context_fn"] = partial(
            create_selective_checkpoint_contexts,
            partial(_policy, operators_with_prefix(training.activation_operators)),
        )
    for block in blocks[:: setting if isinstance(setting, int) else 1]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **kept)


def operators_with_prefix(split_points: tuple[str, ...]) -> frozenset[str]:
    """Return torch's operators whose names begin so; a leading underscore does not count.

    Raises:
        StageFailed: there are none of one beginning.
    """
    names = {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    known = {name.removeprefix("aten::").lstrip("_"): name for name in sorted(names)}
    for beginning in split_points:
        if not any(name.startswith(beginning) for name in known):
            near = difflib.get_close_matches(beginning, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StageFailed(f"activation_operators: torch has no {beginning!r}{hint}")
    return frozenset(
        n for n in names if n.removeprefix("aten::").lstrip("_").startswith(split_points)
    )


def _policy(
    kept: frozenset[str], context: object, operator: Any, *inputs: object, **named: object
) -> CheckpointPolicy:
    if operator.name().partition(".")[0] in kept:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
