"""torch.compile of the model or of its blocks, precision of matrix products, memory format."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config as functorch_config

from compress.training.config.training import Compilation
from compress.training.optim.transformer_blocks import chosen_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from compress.training.config.training import Training


def compile_(module: nn.Module, training: Training) -> None:
    """Compile the model or each of its blocks in place, at the first call; names of weights stay.

    To be called after activation checkpointing, which is compiled too, and before sharding and DDP,
    whose hooks are not compiled.
    """
    options: dict[str, Any] = {}
    if isinstance(training.compile, Compilation):
        options = training.compile.model_dump(exclude={"what"})
    if training.compiled_part == "whole":
        module.compile(**options)
    elif training.compiled_part == "blocks":
        for block in chosen_blocks(module, training.activation_blocks, "compile: blocks"):
            block.compile(**options)


@contextmanager
def matmul_precision(training: Training) -> Iterator[None]:
    """Compute fp32 matrix products at the precision of the settings inside a block."""
    previous = torch.get_float32_matmul_precision()
    if training.matmul_precision != "highest":
        torch.set_float32_matmul_precision(training.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


@contextmanager
def memory_budget(training: Training) -> Iterator[None]:
    """Let what torch.compile compiles inside a block keep fewer activations, as `selective`."""
    if training.activation_checkpointing != "selective" or training.compile == "none":
        yield
        return
    with functorch_config.patch(activation_memory_budget=training.activation_budget):
        yield


IMAGE_DIMENSIONS = 4


def use_channels_last_(module: nn.Module) -> None:
    """Lay out weights of four dimensions with channels last, and such inputs at each call."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.register_forward_pre_hook(_rearrange)


def _rearrange(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(
        x.contiguous(memory_format=torch.channels_last) if x.dim() == IMAGE_DIMENSIONS else x
        for x in inputs
    )
