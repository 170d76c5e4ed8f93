"""The parts of a model that one process of a pipeline holds, and how they run.

A part runs the model's own forward from the module where it begins to the one where the next part
begins. Nothing is traced: dropout, checkpointed activations and names of weights stay as they are.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compress.common.forward import flatten_outputs
from compress.training.model_parallel.pipeline_split import Partition, find_tensor, strip_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from compress.training.config.pipeline import Pipeline

Form = tuple[torch.Size, torch.dtype]


class Parts:
    """The parts of a module that this process runs, and its neighbours in the pipeline.

    Called as before, the module answers, and does so in all processes of the pipeline.
    """

    def __init__(
        self, module: nn.Module, partition: Partition, settings: Pipeline, group: dist.ProcessGroup
    ) -> None:
        """Keep this process's parts of a module, in place."""
        self.module, self.partition, self.settings, self.group = module, partition, settings, group
        self.stage = dist.get_rank(group)
        self.own = list(range(self.stage, settings.parts, settings.stages))
        self.device = next(module.parameters()).device
        self.precision: Callable[[], AbstractContextManager[object]] = nullcontext
        """In what forward passes of training run."""
        self.forms: list[list[Form]] = []
        """Shape and type of what each part handed on when all ran in turn."""
        self.handles: list[Any] = []
        self.asked: tuple[int, torch.Tensor | None] | None = None
        """The part that the module's next call is for, and what it is handed."""
        self.running: int | None = None
        self.hidden: torch.Tensor | None = None
        strip_(module, partition, self.own)
        self.forward = module.forward
        module.forward = self._answer
        for name, (part, rest) in partition.blocks.items():
            block = module.get_submodule(name)
            block.forward = partial(self._block, block.forward, part, rest)

    def listen(self) -> None:
        """Take part in the calls of the modules with which parts begin."""
        for number, name in enumerate(self.partition.beginnings, 1):
            part = self.module.get_submodule(name)
            hook = partial(self._at_beginning, number)
            handle = part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            self.handles.append(handle)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for a block."""
        self.listen()
        yield
        while self.handles:
            self.handles.pop().remove()

    def ask(self, part: int, hidden: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> Any:
        """Call the module, with what FSDP does around it, for one part alone."""
        self.asked = (part, hidden)
        try:
            with self.precision():
                return self.module(*inputs)
        finally:
            self.asked = None

    def measure(self, inputs: Sequence[torch.Tensor]) -> None:
        """Run all parts once, to learn the forms of what they hand on, and leave no trace."""
        modes = [(part, part.training) for part in self.module.modules()]
        devices = [self.device] if self.device.type == "cuda" else []
        self.module.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            self._in_turn(self.ask, inputs)
        for part, training in modes:
            part.training = training

    def left_by_their_end(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the modules whose forward ends by itself: parts end in the midst of others."""
        begin = {self.module.get_submodule(name) for name in self.partition.beginnings}
        return [block for block in blocks if not begin & (set(block.modules()) - {block})]

    def _answer(self, *inputs: torch.Tensor) -> Any:
        """Stand in for the module's forward: all parts in turn, or the one asked for."""
        if self.asked is not None:
            return self._run(*self.asked, inputs)
        return tuple(self._in_turn(self._run, inputs))

    def _in_turn(
        self, run: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run all parts, each where it is held, and return the outputs in all processes."""
        self.forms = []
        handed: list[torch.Tensor] = []
        for part in range(self.settings.parts):
            if part in self.own:
                out = run(part, handed[0] if handed else None, inputs)
                handed = [out] if isinstance(out, torch.Tensor) else list(out)
            handed = self._shared(handed, part % self.settings.stages)
            self.forms.append([(tensor.shape, tensor.dtype) for tensor in handed])
        return handed

    def _shared(self, tensors: list[torch.Tensor], source: int) -> list[torch.Tensor]:
        """Return one stage's tensors in all of them."""
        forms: list[Any] = [[(tensor.shape, tensor.dtype) for tensor in tensors]]
        dist.broadcast_object_list(forms, group=self.group, group_src=source)
        if self.stage != source:
            tensors = [torch.empty(s, dtype=d, device=self.device) for s, d in forms[0]]
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensors

    def _run(self, part: int, hidden: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> Any:
        """Return what a part hands on, or the outputs after the last."""
        self.running, self.hidden = part, hidden
        try:
            outputs = self.forward(*inputs)
        except _Reached as reached:
            return reached.hidden.contiguous()
        finally:
            self.running = self.hidden = None
        return tuple(output.contiguous() for output in flatten_outputs(outputs))

    def _block(
        self, forward: Callable[..., Any], part: int, rest: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for a block's forward: blocks of earlier parts hand on what they take."""
        if self.running is None or part >= self.running:
            return forward(*args, **kwargs)
        hidden = find_tensor(args, kwargs)[1]
        return hidden if rest is None else (hidden, *rest)

    def _at_beginning(
        self, number: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        place, hidden = find_tensor(args, kwargs)
        if self.running is not None and number == self.running + 1:
            raise _Reached(hidden)
        if number != self.running or self.hidden is None:
            return None
        if isinstance(place, str):
            return args, {**kwargs, place: self.hidden}
        return (*args[:place], self.hidden, *args[place + 1 :]), kwargs


class _Reached(Exception):
    """No error: the way out of a forward that would go on."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
