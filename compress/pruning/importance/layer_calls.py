"""Observe the inputs and outputs of each layer with a weight while a module runs.

Layers are recognised by the functions they call on their weights, not by their classes, so that a
weight used through ``F.conv2d``, or in a layer of another library, is observed too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from compress.common.errors import StageFailed, raised_as
from compress.common.forward import run_in_eval, shallow_copy

if TYPE_CHECKING:
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
SCALES = {"alpha", "beta"}  # arguments of `addmm`


@dataclass(frozen=True)
class LayerInput:
    """What one call of a layer reads: its weight, by name, and its input."""

    weight: str
    bias: str | None
    added: torch.Tensor | None
    """Tensor that is added to the product: the bias, or what `addmm` adds."""
    read_axis: int
    """The weight's input axis; its output axis is the other of the first two."""
    input: torch.Tensor
    kernel: tuple[int, ...]
    """Size of a convolution's window; empty for a matrix product."""
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after each axis of the window."""
    dilation: tuple[int, ...]
    groups: int

    @property
    def columns(self) -> int:
        """Number of input elements that one output element is computed from."""
        if not self.kernel:
            return self.input.shape[-1]
        channels = self.input.shape[-len(self.kernel) - 1]
        return channels // self.groups * prod(self.kernel)

    @property
    def channel_axis(self) -> int:
        """The channel axis of the input and the output."""
        return self.input.dim() - len(self.kernel) - 1

    def parts(
        self, *answers: torch.Tensor, share: float = 1.0, generator: torch.Generator | None = None
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield unfolded inputs (im2col), and some tensors like the output, as matrices.

        The product of the columns with the weight, flattened with its input axis last, gives the
        output: channels, which are neighbours in memory, are so in columns, too. All have shape
        `(groups, positions, columns or channels)`, have 32 bits a number or more, and are of a few
        samples each. With ``share``, the generator draws so many of the positions.
        """
        if not self.input.numel():  # of an expert, say, that none of a batch's tokens is sent to
            return
        spatial = len(self.kernel)
        if spatial:  # convolutions accept a single sample without a batch axis
            inputs, *rows = (
                x if x.dim() == spatial + 2 else x[None] for x in (self.input, *answers)
            )
            inputs = self._patches(inputs)
            rows = [_in_groups(x, self.groups) for x in rows]
        else:  # each row of a matrix is a sample of one position
            inputs, *rows = (x.reshape(-1, 1, x.shape[-1]) for x in (self.input, *answers))
        # [samples, groups, channels, *positions, …] -> [samples, *positions, groups, …, channels]
        tensors = [x.movedim((1, 2), (1 + spatial, -1)) for x in (inputs, *rows)]
        positions = inputs.shape[3 : 3 + spatial]
        for x in tensors[1:]:  # as of an expert that gets other tokens in one of two models
            if x.shape[: 1 + spatial] != (len(inputs), *positions):
                found, expected = tuple(x.shape[: 1 + spatial]), (len(inputs), *positions)
                raise ValueError(f"outputs of {self.weight} at {found}, expected at {expected}")
        step = max(1, int(MAX_PART / (share * inputs[:1].numel())))
        for i in range(0, len(inputs), step):
            parts = [x[i : i + step] for x in tensors]
            if share < 1:
                shape = (len(parts[0]), *positions)
                # Copies the patches of these positions alone.
                chosen = torch.randperm(prod(shape), generator=generator)
                chosen = chosen[: ceil(share * prod(shape))].sort().values.to(inputs.device)
                parts = [x[torch.unravel_index(chosen, shape)] for x in parts]
            axis = 1 + spatial if share == 1 else 1  # of the groups
            parts = [at_least_float32(x).movedim(axis, 0) for x in parts]
            yield tuple(x.reshape(self.groups, prod(x.shape[1 : 1 + axis]), -1) for x in parts)

    def _patches(self, x: torch.Tensor) -> torch.Tensor:
        """View the windows that a convolution reads.

        Their shape is `[samples, groups, channels, *positions, *kernel]`.
        """
        x = F.pad(x, tuple(chain.from_iterable(reversed(self.padding))))
        for axis, size in enumerate(self.kernel):
            reach = self.dilation[axis] * (size - 1) + 1
            x = x.unfold(axis + 2, reach, self.stride[axis])[..., :: self.dilation[axis]]
        return _in_groups(x, self.groups)


@dataclass(frozen=True)
class LayerCall(LayerInput):
    """One call of a layer, and its output."""

    output: torch.Tensor

    def without_values(self) -> LayerCall:
        """Return the same call with meta tensors, which hold no memory."""
        meta = self.input.to("meta"), self.output.to("meta")
        return replace(self, input=meta[0], output=meta[1], added=None)

    @property
    def positions(self) -> int:
        """Number of output elements of a channel."""
        return self.output.numel() // self.output.shape[self.channel_axis]


class LayerCallMode(TorchFunctionMode):
    """Passes each call of a layer whose weight is a parameter of a module to a callback."""

    def __init__(self, module: nn.Module, on_call: Callable[[LayerCall], None]) -> None:
        """Observe ``module``; ``on_call`` gets each layer call."""
        super().__init__()
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._means = {
            id(norm.running_mean): f"{name}.running_mean".lstrip(".")
            for name, norm in module.named_modules()
            if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None
        }
        self._on_call = on_call
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """Address of a layer's output → the output, and the layer's weight."""
        self._readers: dict[str, list[str | None]] = {}
        """Weight → the running mean of each function that reads its output; None for others."""
        self._uses_of_mean: Counter[str | None] = Counter()
        self.used_elsewhere: set[str] = set()
        """Parameters that functions other than a layer's used, too."""
        self.not_fitted: set[str] = set()
        """Parameters of calls that raised, which the module may catch, or that scale a product."""

    @property
    def means(self) -> dict[str, str]:
        """Weight → running mean of the BatchNorm that alone reads its output, and no other."""
        return {
            weight: str(own[0])
            for weight, own in self._readers.items()
            if len(own) == 1 and self._uses_of_mean[own[0]] == 1
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and pass it to the callback if it is a layer."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        names = {name for x in leaves if (name := self._names.get(id(x)))}
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.not_fitted |= names
            raise
        if SCALES & kwargs.keys():
            self.not_fitted |= names
        is_tensor = isinstance(result, torch.Tensor)
        call = layer_input_of(func, args, kwargs, self._names) if is_tensor else None
        own: tuple[Any, ...] = ()
        if call is not None:
            own = (call.weight, call.bias)
            self._on_call(LayerCall(**vars(call), output=result))
        if is_tensor:
            self.used_elsewhere |= names.difference(own)
        # Functions that give sizes or numbers of dimensions read no output.
        if any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(result)):
            mean = next((self._means[id(x)] for x in leaves if id(x) in self._means), None)
            self._uses_of_mean[mean] += mean is not None
            self.add_reader_(leaves, mean)
        if call is not None:
            self._outputs[id(result)] = weakref.ref(result), call.weight
            self._readers.setdefault(call.weight, [])
        return result

    def add_reader_(self, values: Any, mean: str | None = None) -> None:
        """Note that a function, with the running mean of a BatchNorm, reads outputs of layers."""
        for x in pytree.tree_leaves(values):
            output, weight = self._outputs.get(id(x), (None, ""))
            if output is not None and output() is x:
                self._readers[weight].append(mean)


@contextmanager
def channels_last(modules: Sequence[nn.Module], batch: Batch, device: str) -> Iterator[None]:
    """Store convolutions' weights channels-last in a block, which is faster on the CPU.

    The first module is tried first, in eval mode: where its code needs the usual order, as `view`
    does, nothing changes.
    """
    # oneDNN's results are then channels-last, too: a ResNet-18 at 224 x 224 takes 17 ms a sample
    # instead of 24.
    windows = (p for module in modules for p in module.parameters() if p.dim() == 4)
    weights = [p for p in windows if p.dtype is torch.float32 and p.is_contiguous()]
    if device != "cpu" or not weights:
        yield
        return
    inputs = [x[:2] for x in batch.inputs]
    trial = shallow_copy(modules[0])  # what forward keeps on a module belongs to its own passes
    try:
        expected = run_in_eval(trial, inputs)
        for weight in weights:
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        for own, right in zip(run_in_eval(trial, inputs), expected, strict=True):
            torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-3, equal_nan=True)
    except Exception:  # noqa: BLE001 - a forward may fail in any way, or on two samples
        _make_contiguous_(weights)
    try:
        yield
    finally:
        _make_contiguous_(weights)


def _make_contiguous_(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.contiguous()


def observe_layer_calls(
    module: nn.Module, batches: Sequence[Batch], on_call: Callable[[LayerCall], None], device: str
) -> LayerCallMode:
    """Run a module over batches and pass every layer call to a callback, without gradients.

    Returns what else was observed. The module is in eval mode on the device.

    Raises:
        StageFailed: the module does not take a batch.
    """
    mode = LayerCallMode(module, on_call)
    for batch in batches:
        moved = batch.to(device)
        with refused_samples(batch), torch.no_grad(), mode:
            outputs = module(*moved.inputs)
        mode.add_reader_(outputs)
    return mode


def record_layer_calls(
    module: nn.Module, batch: Batch, device: str
) -> tuple[list[LayerCall], LayerCallMode]:
    """Return one batch's layer calls on meta tensors, and what else was observed."""
    calls: list[LayerCall] = []
    mode = observe_layer_calls(
        module, [batch], lambda call: calls.append(call.without_values()), device
    )
    return calls, mode


def refused_samples(batch: Batch) -> AbstractContextManager[None]:
    """Turn what a model raises in a block into StageFailed: it does not take the samples."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in batch.inputs)
    what = f"the model does not take the calibration samples, a batch of shape {shapes}"
    return raised_as(StageFailed, what, "; the data must give what model.inputs declares")


def layer_input_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], names: Mapping[int, str]
) -> LayerInput | None:
    """Return a function's call as that of a layer; None if its weight is not among ``names``.

    ``names`` gives the names of parameters by the ``id`` of their tensors.
    """
    if func not in _SIGNATURES:
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
    return LayerInput(
        weight=name,
        bias=names.get(id(given.get("bias"))),
        added=given.get("bias"),
        read_axis=read_axis,
        input=given["input"],
        kernel=kernel,
        stride=_each(given.get("stride", 1), kernel),
        padding=padding,
        dilation=dilation,
        groups=given.get("groups", 1),
    )


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as float32 where it has fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _in_groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Split the channels of a convolution's tensor into groups, on an axis of their own."""
    return x.reshape(len(x), groups, -1, *x.shape[2:])


def _each(value: int | Sequence[int], kernel: tuple[int, ...]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * len(kernel) if len(values) == 1 else values
