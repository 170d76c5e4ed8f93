"""The blocks of a model that are sharded, checkpointed or compiled one at a time; torch.compile.

Beside it, what else makes a model compute faster: precision of products and memory format.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from compress.artifacts.edits.block_removal import alike_entries
from compress.common.errors import StageFailed
from compress.core.validation_errors import closest
from compress.training.config.training import Compilation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.training.config.training import Training

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules without a forward of their own."""


def named_blocks(module: nn.Module, classes: Sequence[str], setting: str) -> list[nn.Module]:
    """Find the submodules of the named classes, inner ones first; each class must be there."""
    present = {type(part).__name__ for part in module.modules()}
    for name in classes:
        if name not in present:
            near = closest(name, present)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(sorted(present))}"
            raise StageFailed(f"{setting}: the model has no module of class {name!r}; {hint}")
    named = [part for part in module.modules() if type(part).__name__ in classes]
    # Inner ones first, because sharding an outer one takes all weights that are left in it.
    return [part for part in reversed(named) if part is not module]


def large_blocks(module: nn.Module, parameters: int) -> list[nn.Module]:
    """Find submodules with so many parameters, or more, beside inner blocks; inner ones first."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    blocks: list[nn.Module] = []

    def visit(part: nn.Module) -> int:
        """Return the number of parameters of a module that are in none of the blocks so far."""
        # It reads weights of submodules that it does not call, and so is not divided.
        is_attention = isinstance(part, nn.MultiheadAttention)
        own = sum(p.numel() for p in part.parameters(recurse=is_attention))
        rest = own if is_attention else own + sum(visit(child) for child in part.children())
        is_called = part is not module and not isinstance(part, CONTAINERS)
        if rest < parameters or not is_called:
            return rest
        # A weight that is tied to one outside of the module must be gathered with that.
        inside = Counter(id(p) for _, p in part.named_parameters(remove_duplicate=False))
        if any(uses[key] != count for key, count in inside.items()):
            return rest
        blocks.append(part)
        return 0

    visit(module)
    return blocks


def chosen_blocks(module: nn.Module, classes: Sequence[str], setting: str) -> list[nn.Module]:
    """Find the submodules of the named classes, or the repeated ones, in the model's order."""
    if classes:
        return list(reversed(named_blocks(module, classes, "activation_blocks")))
    return repeated_blocks(
        module,
        f"{setting}: the model has no repeated blocks; name their classes in activation_blocks",
    )


def repeated_blocks(module: nn.Module, message: str) -> list[nn.Module]:
    """Find the outermost repeated submodules: children of one list or sequence, of one class."""
    blocks: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        alike = set(map(id, alike_entries(part).values()))
        for child in part.children():
            if id(child) in alike:
                blocks.append(child)
            else:
                visit(child)

    visit(module)
    if not blocks:
        raise StageFailed(message)
    return blocks


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
