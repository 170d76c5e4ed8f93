"""How one process of a pipeline runs its parts of a model.

A part runs the model's own ``forward`` from the module where the part starts to the one where the
next part starts. Nothing is traced: Python control flow, dropout, activation checkpointing and
names of weights stay as they are.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compress.artifacts.eager_model import flatten_outputs
from compress.training.model_parallel.pipeline_split import Partition, find_tensor, strip_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from compress.training.config.pipeline import Pipeline

ShapeDtype = tuple[torch.Size, torch.dtype]


class LocalParts:
    """The parts of a module that this process runs.

    The module itself stays callable: a call runs all parts, in all processes of the pipeline, and
    gives the outputs in each of them.
    """

    def __init__(
        self, module: nn.Module, partition: Partition, settings: Pipeline, group: dist.ProcessGroup
    ) -> None:
        """Remove the weights of all other parts from a module, and replace its ``forward``."""
        self.module, self.partition, self.settings, self.group = module, partition, settings, group
        self.stage = dist.get_rank(group)
        self.own = list(range(self.stage, settings.parts, settings.stages))
        self.device = next(module.parameters()).device
        self.precision: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context of forward passes in training (autocast)."""
        self.output_specs: list[list[ShapeDtype]] = []
        """Shapes and dtypes of each part's outputs in the latest run of all parts."""
        self.handles: list[Any] = []
        self.requested: tuple[int, torch.Tensor | None] | None = None
        """The one part that the next call of the module runs, and its input; None for all parts."""
        self.running: int | None = None
        self.hidden: torch.Tensor | None = None
        """Input of the running part, from the part before."""
        strip_(module, partition, self.own)
        self.model_forward = module.forward
        module.forward = self._forward
        for name, (part, rest) in partition.blocks.items():
            block = module.get_submodule(name)
            block.forward = partial(self._block_forward, block.forward, part, rest)

    def register_hooks(self) -> None:
        """Register forward hooks on the modules with which parts start."""
        for number, name in enumerate(self.partition.split_points, 1):
            part = self.module.get_submodule(name)
            hook = partial(self._at_split_point, number)
            handle = part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            self.handles.append(handle)

    @contextmanager
    def hooks_registered(self) -> Iterator[None]:
        """Register the hooks inside the block."""
        self.register_hooks()
        yield
        while self.handles:
            self.handles.pop().remove()

    def run_part(
        self, part: int, hidden: torch.Tensor | None, inputs: Sequence[torch.Tensor]
    ) -> Any:
        """Call the module, including FSDP's hooks around it, for one part."""
        self.requested = (part, hidden)
        try:
            with self.precision():
                return self.module(*inputs)
        finally:
            self.requested = None

    def infer_shapes(self, inputs: Sequence[torch.Tensor]) -> None:
        """Run all parts once to record `output_specs`; modes and random numbers stay as before."""
        modes = [(part, part.training) for part in self.module.modules()]
        devices = [self.device] if self.device.type == "cuda" else []
        self.module.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            self._run_all(self.run_part, inputs)
        for part, training in modes:
            part.training = training

    def without_split_points(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the blocks in which no part ends, which FSDP may wrap.

        The forward of the others is left by an exception, after which FSDP's hooks do not run.
        """
        starts = {self.module.get_submodule(name) for name in self.partition.split_points}
        return [block for block in blocks if not starts & (set(block.modules()) - {block})]

    def _forward(self, *inputs: torch.Tensor) -> Any:
        """Replace the module's forward: run all parts in turn, or the requested one."""
        if self.requested is not None:
            return self._run(*self.requested, inputs)
        return tuple(self._run_all(self._run, inputs))

    def _run_all(
        self, run: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run every part in the process that has it; return the outputs in all processes."""
        self.output_specs = []
        tensors: list[torch.Tensor] = []
        for part in range(self.settings.parts):
            if part in self.own:
                out = run(part, tensors[0] if tensors else None, inputs)
                tensors = [out] if isinstance(out, torch.Tensor) else list(out)
            tensors = self._broadcast(tensors, part % self.settings.stages)
            self.output_specs.append([(tensor.shape, tensor.dtype) for tensor in tensors])
        return tensors

    def _broadcast(self, tensors: list[torch.Tensor], source: int) -> list[torch.Tensor]:
        """Return one stage's tensors in all stages."""
        specs: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in tensors]]
        dist.broadcast_object_list(specs, group=self.group, group_src=source)
        if self.stage != source:
            tensors = [torch.empty(s, dtype=d, device=self.device) for s, d in specs[0]]
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensors

    def _run(self, part: int, hidden: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> Any:
        """Return a part's output for the next part, or the model's outputs after the last."""
        self.running, self.hidden = part, hidden
        try:
            outputs = self.model_forward(*inputs)
        except _PartEnd as end:
            return end.hidden.contiguous()
        finally:
            self.running = self.hidden = None
        return tuple(output.contiguous() for output in flatten_outputs(outputs))

    def _block_forward(
        self, forward: Callable[..., Any], part: int, rest: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replace a block's forward: blocks of earlier parts return their input unchanged."""
        if self.running is None or part >= self.running:
            return forward(*args, **kwargs)
        hidden = find_tensor(args, kwargs)[1]
        return hidden if rest is None else (hidden, *rest)

    def _at_split_point(
        self, number: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        place, hidden = find_tensor(args, kwargs)
        if self.running is not None and number == self.running + 1:
            raise _PartEnd(hidden)
        if number != self.running or self.hidden is None:
            return None
        if isinstance(place, str):
            return args, {**kwargs, place: self.hidden}
        return (*args[:place], self.hidden, *args[place + 1 :]), kwargs


class _PartEnd(Exception):
    """Ends the model's forward where the next part starts.

    An exception, because this is the model's own code, in the midst of which nothing else returns.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
