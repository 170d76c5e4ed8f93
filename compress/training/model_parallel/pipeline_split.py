"""Which part of a pipeline computes what, found out by running the whole model once."""

from __future__ import annotations

import difflib
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.training.optim.transformer_blocks import repeated_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from compress.training.config.pipeline import Pipeline

NO_BLOCKS = (
    "parallel.pipeline: the model has no repeated blocks; name the modules with which the parts "
    "begin in pipeline.split"
)


@dataclass
class Partition:
    """The parts of a model, numbered in the order in which they compute."""

    beginnings: list[str]
    """Names of the modules with which the parts after the first begin."""
    weights: dict[str, set[int]] = field(default_factory=dict)
    """The parts that use each weight."""
    buffers: dict[str, set[int]] = field(default_factory=dict)
    """The parts that use each buffer."""
    blocks: dict[str, tuple[int, tuple[Any, ...] | None]] = field(default_factory=dict)
    """Blocks that hand on a tensor of the shape they take: their part, and what else they return
    beside the tensor (None: the tensor alone)."""

    @property
    def parts(self) -> int:
        """Number of parts."""
        return len(self.beginnings) + 1


def partition_of(
    module: nn.Module, pipeline: Pipeline, inputs: Sequence[torch.Tensor]
) -> Partition:
    """Return the parts that the settings ask for.

    Raises:
        StageFailed: there are no such modules or too few blocks, or they are not called in order.
    """
    names = {id(part): name for name, part in module.named_modules()}
    try:
        blocks = [names[id(block)] for block in repeated_blocks(module, NO_BLOCKS)]
    except StageFailed:
        if not pipeline.split:
            raise
        blocks = []
    if pipeline.split:
        _refuse_unknown(pipeline.split, names.values())
    elif len(blocks) < pipeline.parts:
        raise StageFailed(
            f"parallel.pipeline: {len(blocks)} repeated blocks do not fill {pipeline.parts} parts; "
            "lower pipeline.stages, or name modules in pipeline.split"
        )
    even = (
        [blocks[len(blocks) * k // pipeline.parts] for k in range(1, pipeline.parts)]
        if blocks
        else []
    )
    run = _Run(module, list(pipeline.split) or even, blocks)
    return run.partition(inputs)


def strip_(module: nn.Module, partition: Partition, own: Iterable[int]) -> None:
    """Let go of the weights and buffers of all other parts, in place.

    What computes before the first own block runs on zeros, which take no memory and lead nowhere.
    """
    parts = set(own)
    for prefix, part in module.named_modules():
        for name, weight in list(part._parameters.items()):
            path = f"{prefix}.{name}".lstrip(".")
            if weight is not None and not partition.weights[path] & parts:
                del part._parameters[name]
                setattr(part, name, _nothing_like(weight))
        for name, buffer in list(part._buffers.items()):
            path = f"{prefix}.{name}".lstrip(".")
            if buffer is not None and not partition.buffers[path] & parts:
                del part._buffers[name]
                setattr(part, name, buffer)


def find_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | int, torch.Tensor]:
    """Return where the first tensor of a call is, and the tensor; hidden states come first.

    Raises:
        StageFailed: there is none.
    """
    places: list[tuple[str | int, Any]] = [
        *enumerate(args),
        *sorted(kwargs.items(), key=lambda e: e[0] != "hidden_states"),
    ]
    for place, value in places:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return place, value
    raise StageFailed("parallel.pipeline: a part begins with a module that takes no tensor")


class _Run:
    """One forward pass of the whole model, watched."""

    def __init__(self, module: nn.Module, beginnings: list[str], blocks: list[str]) -> None:
        self.module = module
        self.found = Partition(beginnings)
        self.blocks = blocks
        self.handed: list[Any] = []
        """What computed each tensor that is handed on."""
        self.used_in: dict[str, set[int]] = {}

    def partition(self, inputs: Sequence[torch.Tensor]) -> Partition:
        trained = [(w, w.requires_grad) for w in self.module.parameters() if w.is_floating_point()]
        with ExitStack() as stack:
            for weight, was in trained:
                weight.requires_grad_(True)
                stack.callback(weight.requires_grad_, was)
            for handle in self._hooks():
                stack.callback(handle.remove)
            with torch.enable_grad():
                outputs = flatten_outputs(self.module.eval()(*inputs))
            self._assign([o.grad_fn for o in outputs if o.grad_fn is not None])
        return self.found

    def _hooks(self) -> Iterable[Any]:
        for number, name in enumerate(self.found.beginnings):
            part = self.module.get_submodule(name)
            yield part.register_forward_pre_hook(self._begins(number, name), with_kwargs=True)
        for name in self.blocks:
            block = self.module.get_submodule(name)
            yield block.register_forward_hook(self._passes(name), with_kwargs=True)
        for name, part in self.module.named_modules():
            if part._buffers:
                yield part.register_forward_pre_hook(self._uses(name))

    def _begins(self, number: int, name: str) -> Any:
        def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if len(self.handed) != number:
                raise StageFailed(
                    f"parallel.pipeline: {name!r} is called twice or before an earlier part; "
                    "name modules that are called once, in order, in pipeline.split"
                )
            self.handed.append(find_tensor(args, kwargs)[1].grad_fn)

        return hook

    def _passes(self, name: str) -> Any:
        def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            taken, (first, *rest) = find_tensor(args, kwargs)[1], _as_tuple(out)
            alone = not any(isinstance(value, torch.Tensor) for value in rest)
            if isinstance(first, torch.Tensor) and first.shape == taken.shape and alone:
                structure = tuple(rest) if isinstance(out, tuple) else None
                self.found.blocks[name] = (len(self.handed), structure)

        return hook

    def _uses(self, name: str) -> Any:
        def hook(part: nn.Module, args: Any) -> None:
            self.used_in.setdefault(name, set()).add(len(self.handed))

        return hook

    def _assign(self, ends: list[Any]) -> None:
        """Give each weight to the parts between whose beginning and end it is used."""
        if len(self.handed) != len(self.found.beginnings):
            missing = self.found.beginnings[len(self.handed)]
            raise StageFailed(f"parallel.pipeline: {missing!r} is never called")
        every, last = set(range(self.found.parts)), self.found.parts - 1
        uses: dict[int, set[int]] = {}
        for part in range(self.found.parts):
            begin = self.handed[part - 1] if part else None
            for weight in _weights_between(begin, [self.handed[part]] if part < last else ends):
                uses.setdefault(id(weight), set()).add(part)
        for name, weight in self.module.named_parameters(remove_duplicate=False):
            self.found.weights[name] = uses.get(id(weight), {last})
        for name, _ in self.module.named_buffers(remove_duplicate=False):
            self.found.buffers[name] = self.used_in.get(name.rpartition(".")[0], every)


def _weights_between(begin: Any, ends: list[Any]) -> list[torch.Tensor]:
    """Return the leaves of the graph above some results, but not above one of their inputs."""
    waiting, seen, found = [end for end in ends if end is not None], {begin}, []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [before for before, _ in node.next_functions if before is not None]
    return found


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) and out else (out,)


def _nothing_like(weight: torch.Tensor) -> torch.Tensor:
    if type(weight.data) is not torch.Tensor:
        return torch.zeros_like(weight).detach()
    return weight.detach().new_zeros(()).expand(weight.shape)


def _refuse_unknown(split: Sequence[str], known: Iterable[str]) -> None:
    names = set(known)
    for name in split:
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StageFailed(f"parallel.pipeline: the model has no module {name!r}{hint}")
