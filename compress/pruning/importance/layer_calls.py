"""Observe the inputs and outputs of each layer with a weight while a module runs.

Layers are recognised by the functions they call on their weights, not by their classes, so that a
weight used through ``F.conv2d``, or in a layer of another library, is observed too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    from torch import nn

    from compress.data.batch import Batch

MAX_PART = 1 << 23
"""Most elements of unfolded inputs (im2col) that are computed at once: 32 MiB in float32."""
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
        `(groups, positions, columns or channels)`, have 32 bits a number or more, and are of a few
        samples each.
        """
        answers = self.output if answers is None else answers
        spatial = len(self.kernel)
        if spatial:  # convolutions accept a single sample without a batch axis
            inputs, answers = (
                x if x.dim() == spatial + 2 else x[None] for x in (self.input, answers)
            )
        else:  # each row of a matrix is a sample of one position
            inputs, answers = (x.reshape(-1, x.shape[-1]) for x in (self.input, answers))
        size = prod(answers.shape[2:]) * inputs.shape[1] * prod(self.kernel)
        step = max(1, MAX_PART // size)
        for i in range(0, len(inputs), step):
            rows = at_least_float32(answers[i : i + step])
            # [samples, channels, *positions] -> [groups, samples·positions, channels]
            rows = rows.reshape(len(rows), self.groups, -1, *rows.shape[2:]).movedim(2, -1)
            rows = rows.movedim(1, 0).reshape(self.groups, -1, rows.shape[-1])
            yield self._unfolded(inputs[i : i + step]), rows

    def _unfolded(self, x: torch.Tensor) -> torch.Tensor:
        x, spatial = at_least_float32(x), len(self.kernel)
        if spatial:
            x = F.pad(x, tuple(chain.from_iterable(reversed(self.padding))))
        for axis in range(spatial):
            reach = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            x = x.unfold(axis + 2, reach, self.stride[axis])[..., :: self.dilation[axis]]
        # [samples, channels, *positions, *kernel] -> [groups, samples·positions, channels·kernel]
        x = x.reshape(len(x), self.groups, -1, *x.shape[2:]).movedim(1, 0)
        x = x.movedim(2, 2 + spatial)
        return x.reshape(self.groups, prod(x.shape[1 : 2 + spatial]), -1)


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
        call = layer_call_of(func, args, kwargs, result, self._names)
        own: tuple[Any, ...] = ()
        if call is not None:
            own = (call.weight, call.bias)
            self._on_call(call)
        if isinstance(result, torch.Tensor):
            used = (self._names.get(id(x)) for x in pytree.tree_leaves((args, kwargs)))
            self.used_elsewhere |= {name for name in used if name and name not in own}
        return result


def observe_layer_calls(
    module: nn.Module, batches: Sequence[Batch], on_call: Callable[[LayerCall], None], device: str
) -> set[str]:
    """Run a module over batches and pass every layer call to a callback, without gradients.

    Returns the parameters that functions other than a layer's used, too. The module is in eval mode
    on the device.

    Raises:
        StageFailed: the module does not take a batch.
    """
    mode = LayerCallMode(module, on_call)
    for batch in batches:
        moved = batch.to(device)
        try:
            with torch.no_grad(), mode:
                module(*moved.inputs)
        except Exception as error:
            raise samples_refused(batch, error) from error
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


def samples_refused(batch: Batch, error: Exception) -> StageFailed:
    """Build the error that says that a model does not take the calibration samples."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.inputs)
    return StageFailed(
        f"the model does not take the calibration samples, a batch of shape {shapes}: "
        f"{type(error).__name__}: {first_line(error)}; "
        "the data must give what model.inputs declares"
    )


def layer_call_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any, names: Mapping[int, str]
) -> LayerCall | None:
    """Return a function's call as that of a layer; None if its weight is not among ``names``.

    ``names`` gives the names of parameters by the ``id`` of their tensors.
    """
    if func not in _SIGNATURES or not isinstance(output, torch.Tensor):
        return None
    arguments, read_axis = _SIGNATURES[func]
    # torch.addmm names its bias "input", so a call with keywords is not recognised.
    given = {**dict(zip(arguments, args, strict=False)), **kwargs}
    name = names.get(id(given.get("weight")))
    if name is None or given["weight"].dim() < 2:
        return None
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
        bias=names.get(id(given.get("bias"))),
        read_axis=read_axis,
        input=given["input"],
        output=output,
        kernel=kernel,
        stride=_each(given.get("stride", 1), kernel),
        padding=padding,
        dilation=dilation,
        groups=given.get("groups", 1),
    )


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as float32 where it has fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _each(value: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values
