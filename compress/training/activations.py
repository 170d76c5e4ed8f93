"""Activations computed again in the backward pass instead of being kept (Chen et al., 2016)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.utils.checkpoint import checkpoint

from compress.training.blocks import named_blocks, repeated_blocks

if TYPE_CHECKING:
    from torch import nn

    from compress.training.settings import Training


def checkpoint_activations_(module: nn.Module, training: Training) -> None:
    """Let blocks forget their activations, in place; names of weights stay.

    Before sharding and DDP: their hooks then see one forward of each block, not the second.

    Raises:
        StageFailed: the model has no such blocks.
    """
    if training.activation_checkpointing == "none":
        return
    classes = training.activation_blocks
    blocks = (
        list(reversed(named_blocks(module, classes, "activation_blocks")))
        if classes
        else repeated_blocks(module)
    )
    every = 1 if training.activation_checkpointing == "full" else training.activation_checkpointing
    for block in blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
