"""Pooling in ONNX with torch's windows: the last of `ceil_mode`, own divisors, adaptive sizes.

torch drops a last window that would begin in the padding, and counts no cell behind it; ONNX's
shape inference and OpenVINO keep and count them. So `ceil_mode` is written as padding at the end.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from onnxscript import opset18

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

aten = torch.ops.aten
op: Any = opset18
"""Its functions are typed for one element type each."""


class Windows(NamedTuple):
    """Where a pooling's windows lie, as ONNX's attributes; lists are by axis, without the batch."""

    kernel: list[int]
    strides: list[int]
    pads: list[int]
    """Padding at the beginning of each axis, as torch has it; as much is at the end."""
    behind: list[int]
    """Cells that the last window reaches, or of an unknown size may reach, beyond the padding."""

    @classmethod
    def from_arguments(
        cls,
        x: Any,
        axes: int,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        dilation: Sequence[int] = (1,),
    ) -> Windows:
        """Compute the windows from torch's arguments, of which one number stands for all axes."""
        kernel, pads, dilations = (
            [*values] * (axes // len(values)) for values in (kernel_size, padding, dilation)
        )
        strides = [*stride] * (axes // len(stride)) if stride else kernel
        sizes = [*x.shape][-axes:]
        behind = [0] * axes
        for axis, size in enumerate(sizes if ceil_mode else ()):
            reach = dilations[axis] * (kernel[axis] - 1) + 1
            # With so many cells no window begins behind the input and its padding at the beginning,
            # and all that torch counts are inside, whatever the size.
            behind[axis] = min(strides[axis], reach - pads[axis]) - 1
            if isinstance(size, int):
                behind[axis] -= (size + 2 * pads[axis] + behind[axis] - reach) % strides[axis]
        return cls(kernel, strides, pads, [max(0, cells) for cells in behind])

    def attributes(self, pads: Sequence[int]) -> dict[str, Any]:
        """Return ONNX's attributes, with this padding at the beginning."""
        at_end = [pad + more for pad, more in zip(pads, self.behind, strict=True)]
        return {
            "kernel_shape": self.kernel,
            "strides": self.strides,
            "pads": [*pads, *at_end],
        }


def avg_pool(
    axes: int,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Return the average of each window, or its sum over `divisor_override`."""
    windows = Windows.from_arguments(x, axes, kernel_size, stride, padding, ceil_mode)
    pads, rank = windows.pads, len(x.shape)
    if divisor_override is None and count_include_pad and any(windows.behind):
        # Padding counts, and what is behind it does not.
        count_include_pad = False
        if any(pads):
            x, pads = _padded(axes, x, pads, pads, 0.0), [0] * axes
    counts_padding = count_include_pad or divisor_override is not None
    result = _batched(
        axes, rank, x, op.AveragePool, count_include_pad=counts_padding, **windows.attributes(pads)
    )
    if divisor_override is None:
        return result
    factor = op.Constant(value_float=prod(windows.kernel) / divisor_override)
    return op.Mul(result, op.CastLike(factor, x))


def max_pool(
    axes: int,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Return the largest value of each window."""
    windows = Windows.from_arguments(x, axes, kernel_size, stride, padding, ceil_mode, dilation)
    dilations, rank = [*dilation] * (axes // len(dilation)), len(x.shape)
    attributes = {**windows.attributes(windows.pads), "dilations": dilations}
    at_end = attributes["pads"][axes:]
    if any(pad >= size for pad, size in zip(at_end, windows.kernel, strict=True)):
        # onnxruntime takes less padding than the kernel's size, dilated or not.
        x = _padded(axes, x, windows.pads, at_end, -math.inf)
        attributes["pads"] = [0] * (2 * axes)
    return _batched(axes, rank, x, lambda y, **named: op.MaxPool(y, **named)[0], **attributes)


def adaptive_avg_pool(axes: int, x: Any, output_size: Sequence[Any]) -> Any:
    """Return the average of each of `output_size` windows, one axis after another."""
    sizes, rank = [*x.shape][-axes:], len(x.shape)
    are_known = all(isinstance(size, int) for size in (*sizes, *output_size))
    if are_known and not any(map(operator.mod, sizes, output_size)):
        return avg_pool(axes, x, [*map(operator.floordiv, sizes, output_size)])
    zero = op.CastLike(op.Constant(value_float=0.0), x)
    for behind, count in zip(reversed(range(axes)), output_size, strict=True):
        axis = rank - 1 - behind
        windows, is_inside, lengths = _windows(x, axis, behind, count)
        inside = op.Where(is_inside, windows, zero)
        sums = op.ReduceSum(inside, op.Constant(value_ints=[axis + 1]), keepdims=0)
        x = op.Div(sums, op.CastLike(lengths, zero))
    return x


def adaptive_max_pool(axes: int, x: Any, output_size: Sequence[Any]) -> tuple[Any, Any]:
    """Return the largest value of each of `output_size` windows, and its place in the input."""
    rank = len(x.shape)
    sizes = op.Shape(x, start=rank - axes)
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    numbers = op.Range(zero, op.ReduceProd(sizes, keepdims=0), one)
    places = op.Expand(op.Reshape(numbers, sizes), op.Shape(x))
    for behind, count in zip(reversed(range(axes)), output_size, strict=True):
        axis = rank - 1 - behind
        windows, _, _ = _windows(x, axis, behind, count)
        best = op.ArgMax(windows, axis=axis + 1)
        here, _, _ = _windows(places, axis, behind, count)
        squeezed = op.Constant(value_ints=[axis + 1])
        x, places = (
            op.Squeeze(op.GatherElements(values, best, axis=axis + 1), squeezed)
            for values in (windows, here)
        )
    return x, places


def _windows(x: Any, axis: int, behind: int, count: Any) -> tuple[Any, Any, Any]:
    """Return an axis as windows, which of their values are inside, and the windows' lengths.

    Window i of n goes from floor(i s / n) to ceil((i + 1) s / n) of an axis of size s. The windows
    are (…, n, longest, …), where shorter ones are filled up with their last value. What is returned
    beside them fits to them but for the `behind` axes after this one, which have one element.
    """
    zero, one = (op.Constant(value_ints=[number]) for number in (0, 1))
    number = op.Constant(value_ints=[count]) if isinstance(count, int) else op.Reshape(count, one)
    size = op.Shape(x, start=axis, end=axis + 1)
    places = op.Range(op.Squeeze(zero), op.Squeeze(number), op.Squeeze(one))
    starts_N = op.Div(op.Mul(places, size), number)
    # ceil(a / n) as floor((a + n - 1) / n), in integers.
    ends_N = op.Div(op.Add(op.Mul(op.Add(places, one), size), op.Sub(number, one)), number)
    lengths_N = op.Sub(ends_N, starts_N)
    longest = op.ReduceMax(lengths_N, keepdims=0)
    steps_L = op.Range(op.Squeeze(zero), longest, op.Squeeze(one))
    wanted_NL = op.Add(op.Unsqueeze(starts_N, one), steps_L)
    ends_N1 = op.Unsqueeze(ends_N, one)
    windows = op.Gather(x, op.Min(wanted_NL, op.Sub(ends_N1, one)), axis=axis)
    is_inside, lengths = op.Less(wanted_NL, ends_N1), lengths_N
    if behind:
        is_inside = op.Unsqueeze(is_inside, op.Constant(value_ints=[*range(2, 2 + behind)]))
        lengths = op.Unsqueeze(lengths, op.Constant(value_ints=[*range(1, 1 + behind)]))
    return windows, is_inside, lengths


def _padded(axes: int, x: Any, start: Sequence[int], end: Sequence[int], value: float) -> Any:
    """Return the input with constant cells around its last axes."""
    others = [0] * (len(x.shape) - axes)
    sizes = op.Constant(value_ints=[*others, *start, *others, *end])
    return op.Pad(x, sizes, op.CastLike(op.Constant(value_float=value), x))


def _batched(axes: int, rank: int, x: Any, pool: Callable[..., Any], **attributes: Any) -> Any:
    """Pool, with a batch axis where the input has none."""
    if rank > axes + 1:
        return pool(x, **attributes)
    first = op.Constant(value_ints=[0])
    return op.Squeeze(pool(op.Unsqueeze(x, first), **attributes), first)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.avg_pool1d.default: partial(avg_pool, 1),
    aten.avg_pool2d.default: partial(avg_pool, 2),
    aten.avg_pool3d.default: partial(avg_pool, 3),
    aten.max_pool1d.default: partial(max_pool, 1),
    aten.max_pool2d.default: partial(max_pool, 2),
    aten.max_pool3d.default: partial(max_pool, 3),
    aten._adaptive_avg_pool2d.default: partial(adaptive_avg_pool, 2),
    aten._adaptive_avg_pool3d.default: partial(adaptive_avg_pool, 3),
    aten.adaptive_max_pool2d.default: partial(adaptive_max_pool, 2),
    aten.adaptive_max_pool3d.default: partial(adaptive_max_pool, 3),
}
"""Operator → the form that replaces torch's."""
