"""The blocks of a model that are sharded, checkpointed or compiled one at a time.

Activation checkpointing is after Chen et al., "Training Deep Nets with Sublinear Memory Cost"
(2016); `selective` saves the results that cost most FLOPs within a budget, as the memory budget of
torch.compile does for compiled models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from torch.utils.flop_counter import flop_registry

from compress.artifacts.edits.removal import alike_entries
from compress.common.errors import StageFailed
from compress.common.process import random_state_kept
from compress.core.validation_errors import closest
from compress.training.config.training import ActivationSegments, Compilation, Training

if TYPE_CHECKING:
    ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    Contexts = Callable[[], ContextPair]

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


def memory_budget(training: Training) -> AbstractContextManager[object]:
    """Let what torch.compile compiles inside a block keep fewer activations, as `selective`."""
    if training.activation_checkpointing != "selective" or training.compile == "none":
        return nullcontext()
    return functorch_config.patch(activation_memory_budget=training.activation_budget)  # type: ignore[no-any-return]


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


def checkpoint_activations_(module: nn.Module, training: Training) -> None:
    """Wrap the forward of blocks in torch's checkpoint, in place; names of weights stay."""
    setting = training.activation_checkpointing
    if setting == "none" or (setting == "selective" and training.compile != "none"):
        return  # torch.compile chooses by itself, see `memory_budget`
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


# torch 2.13 counts no FLOPs of the CPU's attention kernel.
FLOPS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    )
}
"""Functions that count an operator's FLOPs; operators without one are cheap."""


class SelectiveBlock:
    """Replaces a block's forward: expensive results are saved, all others computed again."""

    def __init__(
        self, block: nn.Module, budget: float, with_buffers: Callable[[Contexts], ContextPair]
    ) -> None:
        self.block, self.forward, self.budget = block, block.forward, budget
        self.with_buffers = with_buffers
        self.saved: frozenset[int] | None = None
        """Positions of the saved results among those of expensive operators in one call."""
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; the first call measures it before."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.saved is None:
            self.saved = self._choose(*args, **kwargs)
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            context_fn=partial(self.with_buffers, self._contexts),
            **kwargs,
        )

    def _contexts(self) -> ContextPair:
        saved = self.saved or frozenset()
        # torch 2.11 asks the policy while it computes again, too; 2.13 in the forward pass alone,
        # where `is_recompute` is always False.
        positions = {False: -1, True: -1}

        def policy(context: Any, operator: Any, *_: object, **named: object) -> CheckpointPolicy:
            if operator.overloadpacket in FLOPS:
                positions[context.is_recompute] += 1
                if positions[context.is_recompute] in saved:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call, no-any-return]

    def _choose(self, *args: Any, **kwargs: Any) -> frozenset[int]:
        """Run the block once, and choose the results that save most FLOPs within the budget.

        Random numbers and buffers stay as they are.
        """
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        buffers = list(self.block.buffers())
        before = [buffer.clone() for buffer in buffers]
        recorder = _Recorder()
        device = inputs[0].device if inputs else "cpu"
        hooks = saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
        with random_state_kept(str(device)), torch.enable_grad(), recorder, hooks:
            # Alive, the outputs hold what is saved, so that no address of memory is used twice.
            outputs = self.forward(*args, **kwargs)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        weights = {t.untyped_storage()._cdata for t in (*self.block.parameters(), *buffers)}
        kept = {c: size for c, size in recorder.saved_bytes.items() if c not in weights}
        # A checkpoint keeps the inputs.
        given = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in inputs}
        del outputs
        total = sum(kept.values())
        room = self.budget - sum(given.values()) / max(1, total)
        useful = [
            (position, flops, size / max(1, total))
            for position, (flops, size) in enumerate(recorder.results[: recorder.useful])
        ]
        if room <= 0 or not useful:
            return frozenset()
        _, chosen, _ = dp_knapsack([u[2] for u in useful], [float(u[1]) for u in useful], room)
        return frozenset(useful[index][0] for index in chosen)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records FLOPs and bytes of expensive operators' results, and what is saved for backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[tuple[int, int]] = []
        self.saved_bytes: dict[int, int] = {}
        self.useful = 0
        """Number of results before the last tensor that is saved for the backward pass: recomputing
        ends there, so that later ones need not be saved."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if count := FLOPS.get(func.overloadpacket):
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self.results.append((count(*args, **(kwargs or {}), out_val=result), size))
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.saved_bytes[storage._cdata] = storage.nbytes()
        self.useful = len(self.results)
        return tensor.detach()  # an operator that held its own output would never be freed
