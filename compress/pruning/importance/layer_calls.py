"""Calls: what each layer with a weight reads and answers while a module runs.

Layers are recognised by the functions they call on their weights, not by their classes, so that a
weight used through ``F.conv2d``, or in a layer of another library, is seen too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from compress.common.errors import StageFailed, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from compress.data.batch import Batch

LARGEST_PART = 1 << 22
"""Numbers in the columns that are made at once."""
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_SIGNATURES: dict[Any, tuple[tuple[str, ...], int]] = {
    F.linear: (("input", "weight", "bias"), 1),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (_CONVOLUTION, 1)),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), (("bias", "input", "weight"), 0)),
    **dict.fromkeys((torch.matmul, torch.mm), (("input", "weight"), 0)),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.mm), (("input", "weight"), 0)),
    torch.Tensor.__matmul__: (("input", "weight"), 0),
}
"""Function → its arguments, and the weight's axis along which it reads."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: the weight's name, what it read, and what it answered."""

    weight: str
    bias: str | None
    read_axis: int
    """The weight's axis along which it reads; it makes channels along the other of the first two.
    """
    input: torch.Tensor
    output: torch.Tensor
    kernel: tuple[int, ...]
    """Size of a convolution's window; empty for a product."""
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after each axis of the window."""
    dilation: tuple[int, ...]
    groups: int

    def without_values(self) -> LayerCall:
        """Return the same call with shapes alone, which holds no memory."""
        return replace(self, input=self.input.to("meta"), output=self.output.to("meta"))

    @property
    def columns(self) -> int:
        """How many numbers of the input go into one of the output."""
        if not self.kernel:
            return self.input.shape[-1]
        channels = self.input.shape[-len(self.kernel) - 1]
        return channels // self.groups * prod(self.kernel)

    @property
    def channel_axis(self) -> int:
        """The axis of the output along which its channels lie."""
        return self.output.dim() - len(self.kernel) - 1

    def parts(
        self, answers: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield columns and answers as stacks of matrices, a few samples at a time.

        A product of the columns with the weight, flattened, gives the answers: both are of shape
        [groups, places, entries], in double precision.

        Args:
            answers: a tensor like ``output``, with any number of channels; by default that.
        """
        answers = self.output if answers is None else answers
        if not self.kernel:
            columns, rows = (x.reshape(1, -1, x.shape[-1]) for x in (self.input, answers))
            step = max(1, LARGEST_PART // columns.shape[-1])
            for i in range(0, columns.shape[1], step):
                yield columns[:, i : i + step].double(), rows[:, i : i + step].double()
            return
        inputs, answers = (self._with_batch(x) for x in (self.input, answers))
        size = prod(answers.shape[2:]) * inputs.shape[1] * prod(self.kernel)
        step = max(1, LARGEST_PART // size)
        for i in range(0, len(inputs), step):
            yield self._unfolded(inputs[i : i + step]), self._grouped(answers[i : i + step])

    def _with_batch(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == len(self.kernel) + 2 else x[None]

    def _unfolded(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.double(), tuple(chain.from_iterable(reversed(self.padding))))
        spatial = len(self.kernel)
        for axis in range(spatial):
            reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            x = x.unfold(axis + 2, reach, self.stride[axis])[..., :: self.dilation[axis]]
        # [samples, channels, *places, *kernel] -> [groups, samples and places, channels and kernel]
        x = x.reshape(len(x), self.groups, -1, *x.shape[2:]).movedim(1, 0)
        x = x.movedim(2, 2 + spatial)
        return x.reshape(self.groups, prod(x.shape[1 : 2 + spatial]), -1)

    def _grouped(self, answers: torch.Tensor) -> torch.Tensor:
        answers = answers.double().reshape(len(answers), self.groups, -1, *answers.shape[2:])
        answers = answers.movedim(2, -1)
        return answers.movedim(1, 0).reshape(self.groups, -1, answers.shape[-1])


class Enough(Exception):
    """What a watcher raises to end a forward pass early."""


class Calls(TorchFunctionMode):
    """Hands over each call of a layer whose weight is a parameter of a module."""

    def __init__(self, module: nn.Module, watch: Callable[[LayerCall], None]) -> None:
        """Take the module that will run, and what is told of its calls."""
        super().__init__()
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._watch = watch
        self.used_otherwise: set[str] = set()
        """Parameters that other functions took, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and tell of it where it is a layer."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, read_axis = _arguments(func, args, kwargs)
        name = self._name(given.get("weight"))
        own: tuple[Any, ...] = ()
        if name and given["weight"].dim() > 1 and isinstance(result, torch.Tensor):
            own = (given["weight"], given.get("bias"))
            bias = self._name(given.get("bias"))
            call = _call(name, bias, given, read_axis, result)
            self._watch(call)
        if isinstance(result, torch.Tensor):
            others = (x for x in pytree.tree_leaves((args, kwargs)) if id(x) in self._names)
            self.used_otherwise |= {
                self._names[id(x)] for x in others if not any(x is known for known in own)
            }
        return result

    def _name(self, tensor: Any) -> str | None:
        return self._names.get(id(tensor)) if tensor is not None else None


def watched(
    module: nn.Module, batches: Sequence[Batch], watch: Callable[[LayerCall], None], device: str
) -> set[str]:
    """Run a module over batches, tell of every layer's call, and return what is used otherwise.

    Gradients are off. A watcher may end a batch by raising :class:`Enough`.

    Args:
        module: a module in eval mode, on the device.
        batches: what it is asked.
        watch: takes each call.
        device: where batches go.

    Raises:
        StageFailed: the module does not take the batches.
    """
    mode = Calls(module, watch)
    for batch in batches:
        run_one(module, batch.to(device), mode)
    return mode.used_otherwise


@torch.no_grad()
def run_one(module: nn.Module, batch: Batch, mode: Calls) -> None:
    """Run a module on one batch, watched.

    Raises:
        StageFailed: the module does not take the batch.
    """
    try:
        with mode:
            module(*batch.inputs)
    except Enough:
        return
    except Exception as error:
        raise refused(batch, error) from error


def refused(batch: Batch, error: Exception) -> StageFailed:
    """Return the error that says that a model does not take the calibration samples."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.inputs)
    return StageFailed(
        f"the model does not take the calibration samples, a batch of shape {shapes}: "
        f"{type(error).__name__}: {first_line(error)}; "
        "the data must give what model.inputs declares"
    )


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    if func not in _SIGNATURES:
        return {}, 0
    names, read_axis = _SIGNATURES[func]
    # torch.addmm calls its bias "input", in a call by keywords it is not recognised.
    return {**dict(zip(names, args, strict=False)), **kwargs}, read_axis


def _call(
    name: str, bias: str | None, given: dict[str, Any], read_axis: int, output: torch.Tensor
) -> LayerCall:
    kernel = tuple(given["weight"].shape[2:])
    dilation = _each(given.get("dilation", 1), kernel)
    return LayerCall(
        weight=name,
        bias=bias,
        read_axis=read_axis,
        input=given["input"],
        output=output,
        kernel=kernel,
        stride=_each(given.get("stride", 1), kernel),
        padding=_padding(given.get("padding", 0), kernel, dilation),
        dilation=dilation,
        groups=given.get("groups", 1),
    )


def _each(value: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values


def _padding(
    value: int | str | Sequence[int], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    if value == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((n, n) for n in _each(0 if isinstance(value, str) else value, kernel))
