"""Division of a model into parts for pipeline parallelism, found by running it once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.core.validation_errors import closest
from compress.training.optim.transformer_blocks import repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from compress.training.config.parallel import PipelineParallel

NO_BLOCKS = (
    "parallel.pipeline: the model has no repeated blocks; name the modules with which the parts "
    "begin in pipeline.split"
)


@dataclass
class Partition:
    """Division of a model into parts, numbered in the order in which they compute."""

    split_points: list[str]
    """Names of the modules with which the parts after the first start."""
    weights: dict[str, set[int]] = field(default_factory=dict)
    """The parts that use each weight."""
    buffers: dict[str, set[int]] = field(default_factory=dict)
    """The parts that use each buffer."""
    blocks: dict[str, tuple[int, tuple[Any, ...] | None]] = field(default_factory=dict)
    """Blocks whose output has the shape of their input, and so can be skipped: their part, and the
    further values that they return in a tuple (None: they return the tensor alone)."""


def split_into_parts(
    module: nn.Module, pipeline: PipelineParallel, inputs: Sequence[torch.Tensor]
) -> Partition:
    """Divide a module as the settings say: at `split`, or evenly between repeated blocks."""
    names = {id(part): name for name, part in module.named_modules()}
    try:
        blocks = [names[id(block)] for block in repeated_blocks(module, NO_BLOCKS)]
    except StageFailed:
        if not pipeline.split:
            raise
        blocks = []
    if pipeline.split:
        for name in pipeline.split:
            if name not in names.values():
                near = closest(name, names.values())
                hint = f"; did you mean {near!r}?" if near else ""
                raise StageFailed(f"parallel.pipeline: the model has no module {name!r}{hint}")
    elif len(blocks) < pipeline.parts:
        raise StageFailed(
            f"parallel.pipeline: {len(blocks)} repeated blocks do not fill {pipeline.parts} parts; "
            "lower pipeline.stages, or name modules in pipeline.split"
        )
    split_points = list(pipeline.split) or [
        blocks[len(blocks) * k // pipeline.parts] for k in range(1, pipeline.parts)
    ]
    return _TracedRun(module, split_points, blocks).partition(inputs)


def strip_(
    module: nn.Module, partition: Partition, own: Iterable[int], device: torch.device
) -> None:
    """Remove the weights and buffers of all other parts, in place.

    Weights may be on the meta device; what takes their place is on the given one.
    """
    parts = set(own)
    for prefix, part in module.named_modules():
        for name, weight in list(part._parameters.items()):
            path = f"{prefix}.{name}".lstrip(".")
            if weight is not None and not partition.weights[path] & parts:
                del part._parameters[name]
                # Modules before this process's first block still run, on zeros that take no memory;
                # their results are not used.
                value = weight.detach()
                local = value.to_local() if isinstance(value, DTensor) else value
                zeros = torch.zeros((), dtype=local.dtype, device=device).expand(local.shape)
                if isinstance(value, DTensor):
                    zeros = DTensor(zeros, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
                setattr(part, name, zeros)
        for name, buffer in list(part._buffers.items()):
            path = f"{prefix}.{name}".lstrip(".")
            if buffer is not None and not partition.buffers[path] & parts:
                del part._buffers[name]
                setattr(part, name, buffer)


def find_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | int, torch.Tensor]:
    """Return a call's first floating-point tensor, after its position or keyword."""
    # `hidden_states` is transformers' name of what flows from block to block.
    places: list[tuple[str | int, Any]] = [
        *enumerate(args),
        *sorted(kwargs.items(), key=lambda e: e[0] != "hidden_states"),
    ]
    for place, value in places:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return place, value
    raise StageFailed("parallel.pipeline: a part begins with a module that takes no tensor")


class _TracedRun:
    """One forward pass of the whole model, in which hooks record what each part uses."""

    def __init__(self, module: nn.Module, split_points: list[str], blocks: list[str]) -> None:
        self.module = module
        self.result = Partition(split_points)
        self.blocks = blocks
        self.split_nodes: list[Any] = []
        """The autograd node of the tensor at each split point."""
        self.buffer_users: dict[str, set[int]] = {}
        """The parts in which each module with buffers is called."""

    def partition(self, inputs: Sequence[torch.Tensor]) -> Partition:
        # Frozen weights too must be part of the graph, by which weights are assigned to parts.
        trained = [(w, w.requires_grad) for w in self.module.parameters() if w.is_floating_point()]
        with ExitStack() as stack:
            for weight, was in trained:
                weight.requires_grad_(True)
                stack.callback(weight.requires_grad_, was)
            for number, name in enumerate(self.result.split_points):
                part = self.module.get_submodule(name)
                before_part = partial(self._at_split_point, number, name)
                handle = part.register_forward_pre_hook(before_part, with_kwargs=True)
                stack.callback(handle.remove)
            for name in self.blocks:
                block = self.module.get_submodule(name)
                after_block = partial(self._after_block, name)
                handle = block.register_forward_hook(after_block, with_kwargs=True)
                stack.callback(handle.remove)
            for name, part in self.module.named_modules():
                if part._buffers:
                    handle = part.register_forward_pre_hook(partial(self._use_buffers, name))
                    stack.callback(handle.remove)
            with torch.enable_grad():
                outputs = flatten_outputs(self.module.eval()(*inputs))
            self._assign([o.grad_fn for o in outputs if o.grad_fn is not None])
        return self.result

    def _at_split_point(self, number: int, name: str, part: nn.Module, args: Any, kw: Any) -> None:
        if len(self.split_nodes) != number:
            raise StageFailed(
                f"parallel.pipeline: {name!r} is called twice or before an earlier part; "
                "name modules that are called once, in order, in pipeline.split"
            )
        self.split_nodes.append(find_tensor(args, kw)[1].grad_fn)

    def _after_block(self, name: str, part: nn.Module, args: Any, kw: Any, out: Any) -> None:
        hidden = find_tensor(args, kw)[1]
        first, *rest = out if isinstance(out, tuple) and out else (out,)
        one_tensor = not any(isinstance(value, torch.Tensor) for value in rest)
        if isinstance(first, torch.Tensor) and first.shape == hidden.shape and one_tensor:
            structure = tuple(rest) if isinstance(out, tuple) else None
            self.result.blocks[name] = (len(self.split_nodes), structure)

    def _use_buffers(self, name: str, part: nn.Module, args: Any) -> None:
        self.buffer_users.setdefault(name, set()).add(len(self.split_nodes))

    def _assign(self, ends: list[Any]) -> None:
        """Assign each weight to the parts between whose start and end it is used."""
        if len(self.split_nodes) != len(self.result.split_points):
            missing = self.result.split_points[len(self.split_nodes)]
            raise StageFailed(f"parallel.pipeline: {missing!r} is never called")
        every, last = range(len(self.split_nodes) + 1), len(self.split_nodes)
        users: dict[int, set[int]] = {}
        for part in every:
            start = self.split_nodes[part - 1] if part else None
            stops = [self.split_nodes[part]] if part < last else ends
            for weight in leaves_between(start, stops):
                users.setdefault(id(weight), set()).add(part)
        for name, weight in self.module.named_parameters(remove_duplicate=False):
            self.result.weights[name] = users.get(id(weight), {last})
        for name, _ in self.module.named_buffers(remove_duplicate=False):
            self.result.buffers[name] = self.buffer_users.get(name.rpartition(".")[0], set(every))


def leaves_between(start: Any, ends: list[Any]) -> list[torch.Tensor]:
    """Return the leaves of the autograd graph between a node and later ones."""
    pending, seen, leaves = [end for end in ends if end is not None], {start}, []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            leaves.append(node.variable)
        pending += [before for before, _ in node.next_functions if before is not None]
    return leaves
