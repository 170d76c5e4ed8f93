"""Activation checkpointing: recompute activations in the backward pass to save memory.

After Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint, noop_context_fn

from compress.common.errors import StageFailed
from compress.training.config.training import ActivationSegments
from compress.training.optim.activation_checkpoint import SelectiveBlock
from compress.training.optim.transformer_blocks import chosen_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from compress.training.config.training import Training
    from compress.training.optim.activation_checkpoint import ContextPair, Contexts


def checkpoint_activations_(module: nn.Module, training: Training) -> None:
    """Wrap the forward of blocks in torch's checkpoint, in place; names of weights stay."""
    setting = training.activation_checkpointing
    if setting == "none" or (setting == "selective" and training.compile != "none"):
        return  # torch.compile chooses by itself, see `compile.memory_budget`
    blocks = chosen_blocks(module, training.activation_blocks, "activation_checkpointing")
    if isinstance(setting, ActivationSegments):
        for segment in split_into_segments(module, blocks, setting):
            Segment(segment)
        return
    for block in blocks[:: setting if isinstance(setting, int) else 1]:
        with_buffers = partial(with_buffers_preserved, list(block.buffers()))
        if setting == "selective":
            SelectiveBlock(block, training.activation_budget, with_buffers)
            continue
        context_fn: Contexts = noop_context_fn
        if training.compile == "none":  # torch.compile takes no such contexts
            context_fn = partial(with_buffers, noop_context_fn)
        # Not checkpoint_wrapper, which prefixes the names of the weights.
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=context_fn
        )


def with_buffers_preserved(buffers: Sequence[torch.Tensor], contexts: Contexts) -> ContextPair:
    """Return the contexts of forward and recomputation; the latter changes no buffer.

    Otherwise BatchNorm would count each batch twice in its running statistics.
    """
    forward, recomputation = contexts()

    @contextmanager
    def preserving() -> Iterator[None]:
        before = [buffer.clone() for buffer in buffers]
        try:
            with recomputation:
                yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    return forward, preserving()


class Segment:
    """Consecutive blocks that are recomputed together from the first one's inputs, in place.

    The first block's call runs all of them under one checkpoint; a call of a later one returns the
    output that is there already, after a check that its inputs are those with which it was run.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.names = list(blocks)
        self.forwards = [block.forward for block in blocks.values()]
        buffers = [buffer for block in blocks.values() for buffer in block.buffers()]
        self.context_fn = partial(with_buffers_preserved, buffers, noop_context_fn)
        self.arguments: tuple[Any, ...] = ()
        self.outputs: list[Any] = []
        self.versions: list[int] = []
        for position, block in enumerate(blocks.values()):
            block.forward = partial(self._call, position)

    def _call(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of the block at a position."""
        if not torch.is_grad_enabled():
            return self.forwards[position](*args, **kwargs)
        if position == 0:
            if not args or not isinstance(args[0], torch.Tensor):
                raise self._refusal(0, "has no tensor as its first positional argument")
            self.arguments = (args[1:], kwargs)
            self.outputs = checkpoint(
                self._run_all, *args, use_reentrant=False, context_fn=self.context_fn, **kwargs
            )
            self.versions = [_hidden(output)._version for output in self.outputs]
        elif len(self.outputs) <= position:
            raise self._refusal(position, f"is called before {self.names[0]!r}")
        else:
            expected = _hidden(self.outputs[position - 1])
            is_same = args and args[0] is expected
            if not is_same or expected._version != self.versions[position - 1]:
                before = self.names[position - 1]
                raise self._refusal(position, f"does not read the output of {before!r} as it is")
            if not _are_same(self.arguments, (args[1:], kwargs)):
                raise self._refusal(position, f"has other arguments than {self.names[0]!r}")
        output = self.outputs[position]
        if position + 1 == len(self.outputs):
            self.arguments, self.outputs = (), []
        return output

    def _run_all(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the outputs of all blocks, each with that of the one before as its input."""
        outputs: list[Any] = []
        for forward in self.forwards:
            outputs.append(forward(hidden, *args, **kwargs))
            hidden = _hidden(outputs[-1])
        return outputs

    def _refusal(self, position: int, what: str) -> StageFailed:
        return StageFailed(
            "activation_checkpointing: segments is for blocks that are called one after the other, "
            f"with the same further arguments, and {self.names[position]!r} {what}; use full, or "
            "name other blocks in activation_blocks"
        )


def _hidden(output: Any) -> torch.Tensor:
    """Return what a block passes on to the next: its output, or the first of several."""
    hidden = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(hidden, torch.Tensor):
        raise StageFailed(
            "activation_checkpointing: segments is for blocks that return a tensor, alone or as "
            f"the first of several, found {type(output).__name__}; use full"
        )
    return hidden


def _are_same(one: Any, two: Any) -> bool:
    """Return whether two sets of arguments have the same tensors and equal other values."""
    (leaves, spec), (others, other_spec) = tree_flatten(one), tree_flatten(two)
    return spec == other_spec and all(
        a is b or (not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and a == b)
        for a, b in zip(leaves, others, strict=True)
    )


def split_into_segments(
    module: nn.Module, blocks: Sequence[nn.Module], setting: ActivationSegments
) -> list[dict[str, nn.Module]]:
    """Divide each list of blocks evenly, and return all segments but each list's last.

    The last one's backward pass comes first, so that to recompute it would save nothing at the
    peak; torch's ``checkpoint_sequential`` leaves it out, too.
    """
    names = {part: name for name, part in module.named_modules()}
    segments = []
    for _, group in groupby(blocks, lambda block: names[block].rpartition(".")[0]):
        chain = list(group)
        count = len(chain)
        wanted = round(math.sqrt(count)) if setting.segments == "auto" else setting.segments
        parts = min(wanted, count)
        # Larger ones first.
        ends = [-(-index * count // parts) for index in range(parts)]
        segments += [{names[b]: b for b in chain[i:j]} for i, j in pairwise(ends)]
    return segments
