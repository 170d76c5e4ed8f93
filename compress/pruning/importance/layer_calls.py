"""Observe the inputs and outputs of each layer with a weight while a module runs.

Layers are recognised by the functions they call on their weights, not by their classes, so that a
weight used through ``F.conv2d``, or in a layer of another library, is observed too.
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
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from compress.data.batch import Batch

MAX_PART = 1 << 22
"""Most elements of unfolded inputs (im2col) that are computed at once: 32 MiB in float64."""
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_SIGNATURES: dict[Any, tuple[tuple[str, ...], int]] = {
    F.linear: (("input", "weight", "bias"), 1),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), (_CONVOLUTION, 1)),
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), (("bias", "input", "weight"), 0)),
    **dict.fromkeys((torch.matmul, torch.mm), (("input", "weight"), 0)),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.mm), (("input", "weight"), 0)),
    torch.Tensor.__matmul__: (("input", "weight"), 0),
}
"""Function → its arguments, and the weight's input axis."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer: the weight's name, the input and the output."""

    weight: str
    bias: str | None
    read_axis: int
    """The weight's input axis; its output axis is the other of the first two."""
    input: torch.Tensor
    output: torch.Tensor
    kernel: tuple[int, ...]
    """Size of a convolution's window; empty for a matrix product."""
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after each axis of the window."""
    dilation: tuple[int, ...]
    groups: int

    def without_values(self) -> LayerCall:
        """Return the same call with meta tensors, which hold no memory."""
        return replace(self, input=self.input.to("meta"), output=self.output.to("meta"))

    @property
    def columns(self) -> int:
        """Number of input elements that one output element is computed from."""
        if not self.kernel:
            return self.input.shape[-1]
        channels = self.input.shape[-len(self.kernel) - 1]
        return channels // self.groups * prod(self.kernel)

    @property
    def channel_axis(self) -> int:
        """The channel axis of the output."""
        return self.output.dim() - len(self.kernel) - 1

    def parts(
        self, answers: torch.Tensor | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield unfolded inputs (im2col) and ``answers``, by default ``output``, as matrices.

        The product of the columns with the flattened weight gives the answers. Both have shape
        `(groups, positions, columns or channels)`, are float64, and are of a few samples each.
        """
        answers = self.output if answers is None else answers
        if not self.kernel:
            columns, rows = (x.reshape(1, -1, x.shape[-1]) for x in (self.input, answers))
            step = max(1, MAX_PART // columns.shape[-1])
            for i in range(0, columns.shape[1], step):
                yield columns[:, i : i + step].double(), rows[:, i : i + step].double()
            return
        spatial = len(self.kernel)
        # Convolutions accept a single sample without a batch axis.
        inputs, answers = (x if x.dim() == spatial + 2 else x[None] for x in (self.input, answers))
        size = prod(answers.shape[2:]) * inputs.shape[1] * prod(self.kernel)
        step = max(1, MAX_PART // size)
        for i in range(0, len(inputs), step):
            rows = answers[i : i + step].double()
            # [samples, channels, *positions] -> [groups, samples·positions, channels]
            rows = rows.reshape(len(rows), self.groups, -1, *rows.shape[2:]).movedim(2, -1)
            rows = rows.movedim(1, 0).reshape(self.groups, -1, rows.shape[-1])
            yield self._unfolded(inputs[i : i + step]), rows

    def _unfolded(self, x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.double(), tuple(chain.from_iterable(reversed(self.padding))))
        spatial = len(self.kernel)
        for axis in range(spatial):
            reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            x = x.unfold(axis + 2, reach, self.stride[axis])[..., :: self.dilation[axis]]
        # [samples, channels, *positions, *kernel] -> [groups, samples·positions, channels·kernel]
        x = x.reshape(len(x), self.groups, -1, *x.shape[2:]).movedim(1, 0)
        x = x.movedim(2, 2 + spatial)
        return x.reshape(self.groups, prod(x.shape[1 : 2 + spatial]), -1)


class StopForward(Exception):
    """Raised by a callback to end a forward pass early."""


class LayerCallMode(TorchFunctionMode):
    """Passes each call of a layer whose weight is a parameter of a module to a callback."""

    def __init__(self, module: nn.Module, on_call: Callable[[LayerCall], None]) -> None:
        """Observe ``module``; ``on_call`` gets each layer call."""
        super().__init__()
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._on_call = on_call
        self.used_elsewhere: set[str] = set()
        """Parameters that functions other than a layer's used, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and pass it to the callback if it is a layer."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        names, read_axis = _SIGNATURES.get(func, ((), 0))
        # torch.addmm names its bias "input", so a call with keywords is not recognised.
        given = {**dict(zip(names, args, strict=False)), **kwargs} if names else {}
        name = self._name(given.get("weight"))
        own: tuple[Any, ...] = ()
        if name and given["weight"].dim() > 1 and isinstance(result, torch.Tensor):
            own = (given["weight"], given.get("bias"))
            bias = self._name(given.get("bias"))
            self._on_call(_layer_call(name, bias, given, read_axis, result))
        if isinstance(result, torch.Tensor):
            # `is`, because tensors compare element by element.
            others = (x for x in pytree.tree_leaves((args, kwargs)) if id(x) in self._names)
            self.used_elsewhere |= {
                self._names[id(x)] for x in others if not any(x is parameter for parameter in own)
            }
        return result

    def _name(self, tensor: Any) -> str | None:
        return self._names.get(id(tensor)) if tensor is not None else None


def observe_layer_calls(
    module: nn.Module, batches: Sequence[Batch], on_call: Callable[[LayerCall], None], device: str
) -> set[str]:
    """Run a module over batches and pass every layer call to a callback, without gradients.

    Returns the parameters that functions other than a layer's used, too. The module is in eval mode
    on the device; the callback may end a batch by raising :class:`StopForward`.
    """
    mode = LayerCallMode(module, on_call)
    for batch in batches:
        run_batch(module, batch.to(device), mode)
    return mode.used_elsewhere


def record_layer_calls(
    module: nn.Module, batch: Batch, device: str
) -> tuple[list[LayerCall], set[str]]:
    """Return one batch's layer calls on meta tensors, and the parameters used elsewhere, too."""
    calls: list[LayerCall] = []
    used_elsewhere = observe_layer_calls(
        module, [batch], lambda call: calls.append(call.without_values()), device
    )
    return calls, used_elsewhere


@torch.no_grad()
def run_batch(module: nn.Module, batch: Batch, mode: LayerCallMode) -> None:
    """Run a module on one batch in a mode.

    Raises:
        StageFailed: the module does not take the batch.
    """
    try:
        with mode:
            module(*batch.inputs)
    except StopForward:
        return
    except Exception as error:
        raise samples_refused(batch, error) from error


def samples_refused(batch: Batch, error: Exception) -> StageFailed:
    """Build the error that says that a model does not take the calibration samples."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.inputs)
    return StageFailed(
        f"the model does not take the calibration samples, a batch of shape {shapes}: "
        f"{type(error).__name__}: {first_line(error)}; "
        "the data must give what model.inputs declares"
    )


def _layer_call(
    name: str, bias: str | None, given: dict[str, Any], read_axis: int, output: torch.Tensor
) -> LayerCall:
    kernel = tuple(given["weight"].shape[2:])
    dilation = _each(given.get("dilation", 1), kernel)
    zeros = given.get("padding", 0)
    if zeros == "same":  # torch adds an odd zero behind
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        padding = tuple((total // 2, total - total // 2) for total in totals)
    else:
        padding = tuple((n, n) for n in _each(0 if zeros == "valid" else zeros, kernel))
    return LayerCall(
        weight=name,
        bias=bias,
        read_axis=read_axis,
        input=given["input"],
        output=output,
        kernel=kernel,
        stride=_each(given.get("stride", 1), kernel),
        padding=padding,
        dilation=dilation,
        groups=given.get("groups", 1),
    )


def _each(value: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values
