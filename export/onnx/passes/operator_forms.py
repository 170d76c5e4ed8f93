"""ONNX forms of operators for which torch's exporter has none, or one that loses digits or windows.

Attention takes all masks, ranks and types that torch takes.

Pooling: torch drops a last window that would begin in the padding, and counts no cell behind it;
ONNX's shape inference and OpenVINO keep and count them. So `ceil_mode` is written as padding at the
end.

Logarithms and their kin: torch 2.13 writes ``log1p(x)`` as ``Log(1 + x)``, which is 0 at 1e-9, and
``logsigmoid(x)`` as ``Log(Sigmoid(x))``, which is -inf at -100. Each form here is as exact as
torch's own kernel, up to a few roundings. Branches that a Where does not take may be infinite or
NaN: it only selects.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import nn

aten = torch.ops.aten
op: Any = opset18  # its functions are typed for one element type each
RANK = 4  # axes of onnxscript's attention: batch, head, place, feature
NONE, MEAN = 0, 1  # torch's numbers of the reductions of a loss; the third is the sum
BELOW_ONE = 0.5
"""|x| below which the forms for small numbers are used; from there on the plain ones are exact."""
ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)
"""Coefficients of Chebyshev's approximation of erfc, to 1.2e-7 of its value, by powers of
2 / (2 + |x|) (Press et al., "Numerical Recipes", section 6.2)."""


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return attention that is 0 where the mask lets through no key, as torch's is.

    onnxscript 0.7 takes the mean of all values there; its answer is NaN where a mask of floats is
    -inf.
    """
    missing = [*range(RANK - len(query.shape))]

    def with_leading_axes(x: Any) -> Any:
        wider = op.Unsqueeze(x, op.Constant(value_ints=missing))
        wider.shape, wider.dtype = ir.Shape([1] * len(missing) + [*x.shape]), x.dtype
        return wider

    if missing:
        query, key, value = map(with_leading_axes, (query, key, value))
    is_kept: Any = None
    if attn_mask is not None:
        # Finite, so that a row without keys is a mean, and not NaN, which times 0 stays NaN; and
        # half of the lowest number, so that a score added to it is finite as well.
        least = op.Constant(value=ir.tensor(query.dtype.min / 2, dtype=query.dtype))
        zero, lowest = (op.CastLike(op.Constant(value_float=x), query) for x in (0.0, -math.inf))
        if attn_mask.dtype == ir.DataType.BOOL:
            is_kept, attn_mask = attn_mask, op.Where(attn_mask, zero, least)
        else:
            is_kept, attn_mask = op.Greater(attn_mask, lowest), op.Max(attn_mask, least)
    options = (dropout_p, is_causal, scale, enable_gqa)
    result = nn.aten_scaled_dot_product_attention(query, key, value, attn_mask, *options)
    if is_kept is not None:
        axis = op.Constant(value_ints=[-1])
        result = op.Mul(result, op.ReduceMax(op.CastLike(is_kept, query), axis, keepdims=1))
    return op.Squeeze(result, op.Constant(value_ints=missing)) if missing else result


def softmax(form: Callable[..., Any], x: Any, dim: int, dtype: int = -1) -> Any:
    """Return the softmax or its logarithm, computed in `dtype`: ONNX knows none of integers."""
    return form(x if dtype in (-1, None) else op.Cast(x, to=dtype), axis=dim)


def weight_norm(direction: Any, size: Any, dim: int = 0) -> Any:
    """Return a weight of this size along `dim`, which is -1 for one size of all of it."""
    axes = [axis for axis in range(len(direction.shape)) if axis != dim]
    if not axes:  # of no axes, torch's exporter would take the norm over all
        return op.Mul(op.Div(direction, op.Abs(direction)), size)
    norm = op.ReduceL2(direction, op.Constant(value_ints=axes), keepdims=1)
    return op.Mul(direction, op.Div(size, norm))


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
        return {"kernel_shape": self.kernel, "strides": self.strides, "pads": [*pads, *at_end]}


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
    others = [0] * (len(x.shape) - axes)
    sizes = op.Constant(value_ints=[*others, *start, *others, *end])
    return op.Pad(x, sizes, op.CastLike(op.Constant(value_float=value), x))


def _batched(axes: int, rank: int, x: Any, pool: Callable[..., Any], **attributes: Any) -> Any:
    if rank > axes + 1:
        return pool(x, **attributes)
    first = op.Constant(value_ints=[0])
    return op.Squeeze(pool(op.Unsqueeze(x, first), **attributes), first)


def log1p(x: Any) -> Any:
    """Return log(1 + x), by 2 atanh(x / (2 + x)) where x is small."""
    small = op.Mul(_as(2.0, x), op.Atanh(op.Div(x, op.Add(x, _as(2.0, x)))))
    return op.Where(_is_small(x), small, op.Log(op.Add(x, _as(1.0, x))))


def expm1(x: Any) -> Any:
    """Return exp(x) - 1, by 2t / (1 - t) with t = tanh(x / 2) where x is small."""
    t = op.Tanh(op.Mul(x, _as(0.5, x)))
    small = op.Div(op.Add(t, t), op.Sub(_as(1.0, x), t))
    return op.Where(_is_small(x), small, op.Sub(op.Exp(x), _as(1.0, x)))


def log_sigmoid(x: Any) -> Any:
    """Return log(sigmoid(x)), as -softplus(-x)."""
    return op.Neg(op.Softplus(op.Neg(x)))


def log_sigmoid_forward(x: Any) -> tuple[Any, Any]:
    """Return log(sigmoid(x)), and what torch saves for the gradient, which no export reads."""
    return log_sigmoid(x), op.Exp(op.Neg(op.Abs(x)))


def logaddexp(a: Any, b: Any) -> Any:
    """Return log(exp(a) + exp(b)), as the larger one and softplus of minus their distance."""
    return op.Add(op.Max(a, b), op.Softplus(op.Neg(_distance(a, b))))


def logaddexp2(a: Any, b: Any) -> Any:
    """Return log2(2^a + 2^b), in the same way."""
    ln2 = _as(math.log(2), a)
    more = op.Softplus(op.Neg(op.Mul(_distance(a, b), ln2)))
    return op.Add(op.Max(a, b), op.Div(more, ln2))


def logcumsumexp(x: Any, dim: int) -> Any:
    """Return log(cumsum(exp(x))): each sum is taken relative to its own largest term.

    ONNX has no running maximum, so all pairs of elements along the axis are in memory at a time.
    """
    rank = len(x.shape)
    if not rank:
        return x
    order = [axis for axis in range(rank) if axis != dim % rank] + [dim % rank]
    last = op.Transpose(x, perm=order)
    size = op.Squeeze(op.Shape(last, start=rank - 1, end=rank))
    places = op.Range(op.Constant(value_int=0), size, op.Constant(value_int=1))
    before = op.LessOrEqual(
        op.Unsqueeze(places, op.Constant(value_ints=[0])),
        op.Unsqueeze(places, op.Constant(value_ints=[1])),
    )
    rows = op.Unsqueeze(last, op.Constant(value_ints=[-2]))
    terms = op.Where(before, rows, _as(-math.inf, x))
    axis = op.Constant(value_ints=[-1])
    highest = op.ReduceMax(terms, axis, keepdims=1)
    # Of a sum whose terms are all -inf, or one +inf, the difference would be NaN.
    shift = op.Where(op.IsInf(highest), _as(0.0, x), highest)
    summed = op.ReduceSum(op.Exp(op.Sub(terms, shift)), axis, keepdims=0)
    result = op.Add(op.Log(summed), op.Squeeze(shift, axis))
    back = [order.index(i) for i in range(rank)]
    return op.Transpose(result, perm=back)


def erfcx(x: Any) -> Any:
    """Return the scaled complementary error function, exp(x²) erfc(x)."""
    positive = _erfcx_of_positive(op.Abs(x))
    negative = op.Sub(op.Mul(_as(2.0, x), op.Exp(op.Mul(x, x))), positive)
    return op.Where(op.Less(x, _as(0.0, x)), negative, positive)


def erfc(x: Any) -> Any:
    """Return 1 - erf(x), as exp(-x²) erfcx(x) where that is small."""
    small = op.Mul(op.Exp(op.Neg(op.Mul(x, x))), _erfcx_of_positive(op.Abs(x)))
    large = op.Sub(_as(1.0, x), op.Erf(x))
    return op.Where(op.Less(x, _as(BELOW_ONE, x)), large, small)


def log_ndtr(x: Any) -> Any:
    """Return the logarithm of the standard normal cumulative distribution function."""
    z = op.Mul(x, _as(math.sqrt(0.5), x))
    tail = op.Sub(op.Log(op.Mul(_as(0.5, x), _erfcx_of_positive(op.Abs(z)))), op.Mul(z, z))
    usual = log1p(op.Mul(_as(-0.5, x), erfc(z)))
    return op.Where(op.Less(x, _as(-1.0, x)), tail, usual)


def xlog1py(x: Any, y: Any) -> Any:
    """Return x log(1 + y): 0 where x is 0, NaN where y is NaN."""
    zero = op.And(op.Equal(x, _as(0.0, x)), op.Not(op.IsNaN(y)))
    return op.Where(zero, _as(0.0, x), op.Mul(x, log1p(y)))


def binary_cross_entropy_with_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = MEAN
) -> Any:
    """Return the loss by logsigmoid, as torch does: (1 - t) x - (1 + (p - 1) t) logsigmoid(x)."""
    one = _as(1.0, x)
    log_likelihood = log_sigmoid(x)
    if pos_weight is not None:
        factor = op.Add(op.Mul(op.Sub(pos_weight, one), target), one)
        log_likelihood = op.Mul(factor, log_likelihood)
    loss = op.Sub(op.Mul(op.Sub(one, target), x), log_likelihood)
    if weight is not None:
        loss = op.Mul(loss, weight)
    if reduction == NONE:
        return loss
    return (op.ReduceMean if reduction == MEAN else op.ReduceSum)(loss, keepdims=0)


def _as(number: float, like: Any) -> Any:
    return op.CastLike(op.Constant(value_float=number), like)


def _is_small(x: Any) -> Any:
    return op.Less(op.Abs(x), _as(BELOW_ONE, x))


def _distance(a: Any, b: Any) -> Any:
    return op.Where(op.Equal(a, b), _as(0.0, a), op.Abs(op.Sub(a, b)))


def _erfcx_of_positive(z: Any) -> Any:
    t = op.Div(_as(2.0, z), op.Add(z, _as(2.0, z)))
    sum_ = _as(ERFC[-1], z)
    for coefficient in reversed(ERFC[:-1]):
        sum_ = op.Add(op.Mul(sum_, t), _as(coefficient, z))
    return op.Mul(t, op.Exp(sum_))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: attention,
    aten._weight_norm.default: weight_norm,
    aten.softmax.int: partial(softmax, op.Softmax),
    aten.log_softmax.int: partial(softmax, op.LogSoftmax),
    **{getattr(aten, f"avg_pool{n}d").default: partial(avg_pool, n) for n in (1, 2, 3)},
    **{getattr(aten, f"max_pool{n}d").default: partial(max_pool, n) for n in (1, 2, 3)},
    aten._adaptive_avg_pool2d.default: partial(adaptive_avg_pool, 2),
    aten._adaptive_avg_pool3d.default: partial(adaptive_avg_pool, 3),
    aten.adaptive_max_pool2d.default: partial(adaptive_max_pool, 2),
    aten.adaptive_max_pool3d.default: partial(adaptive_max_pool, 3),
    **dict.fromkeys((aten.log1p.default, aten.special_log1p.default), log1p),
    **dict.fromkeys((aten.expm1.default, aten.special_expm1.default), expm1),
    aten.log_sigmoid.default: log_sigmoid,
    aten.log_sigmoid_forward.default: log_sigmoid_forward,
    aten.logaddexp.default: logaddexp,
    aten.logaddexp2.default: logaddexp2,
    aten.logcumsumexp.default: logcumsumexp,
    **dict.fromkeys((aten.erfc.default, aten.special_erfc.default), erfc),
    aten.special_erfcx.default: erfcx,
    aten.special_log_ndtr.default: log_ndtr,
    aten.special_xlog1py.default: xlog1py,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
}
"""Operator → the form that replaces torch's."""
