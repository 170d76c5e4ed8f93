"""Attention, softmax and weight norm in ONNX, for all masks, ranks and types that torch takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import nn

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
op: Any = opset18
"""Its functions are typed for one element type each."""
RANK = 4
"""Axes of onnxscript's attention: batch, head, place, feature."""


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
    if missing:
        query, key, value = (_with_leading_axes(x, missing) for x in (query, key, value))
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


def _with_leading_axes(x: Any, axes: list[int]) -> Any:
    wider = op.Unsqueeze(x, op.Constant(value_ints=axes))
    wider.shape, wider.dtype = ir.Shape([1] * len(axes) + [*x.shape]), x.dtype
    return wider


def softmax(x: Any, dim: int, dtype: int = -1) -> Any:
    """Return the softmax, computed in `dtype` where it is given: ONNX knows none of integers."""
    return op.Softmax(x if dtype in (-1, None) else op.Cast(x, to=dtype), axis=dim)


def log_softmax(x: Any, dim: int, dtype: int = -1) -> Any:
    """Return the logarithm of the softmax, computed in `dtype` where it is given."""
    return op.LogSoftmax(x if dtype in (-1, None) else op.Cast(x, to=dtype), axis=dim)


def weight_norm(direction: Any, size: Any, dim: int = 0) -> Any:
    """Return a weight of this size along `dim`, which is -1 for one size of all of it."""
    axes = [axis for axis in range(len(direction.shape)) if axis != dim]
    if not axes:  # of no axes, torch's exporter would take the norm over all
        return op.Mul(op.Div(direction, op.Abs(direction)), size)
    norm = op.ReduceL2(direction, op.Constant(value_ints=axes), keepdims=1)
    return op.Mul(direction, op.Div(size, norm))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: attention,
    aten._weight_norm.default: weight_norm,
    aten.softmax.int: softmax,
    aten.log_softmax.int: log_softmax,
}
"""Operator → the form that replaces torch's."""
