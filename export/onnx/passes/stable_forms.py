"""Numerically stable ONNX forms of functions that torch's exporter writes in unstable ones.

torch 2.13 writes ``log1p(x)`` as ``Log(1 + x)``, which is 0 at 1e-9, and ``logsigmoid(x)`` as
``Log(Sigmoid(x))``, which is -inf at -100. Each form here is as exact as torch's own kernel, up to
a few roundings. Branches that a Where does not take may be infinite or NaN: it only selects.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from onnxscript import opset18

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
op: Any = opset18
"""Its functions are typed for one element type each."""

NONE, MEAN = 0, 1
"""torch's numbers of the reductions of a loss; the third is the sum."""
BELOW_ONE = 0.5
"""|x| below which the forms for small numbers are used; from there on the plain ones are exact."""
ERFC = (
    *(-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806),
    *(0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277),
)
"""Coefficients of Chebyshev's approximation of erfc, to 1.2e-7 of its value, by powers of
2 / (2 + |x|) (Press et al., "Numerical Recipes", section 6.2)."""


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


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.log1p.default: log1p,
    aten.special_log1p.default: log1p,
    aten.expm1.default: expm1,
    aten.special_expm1.default: expm1,
    aten.log_sigmoid.default: log_sigmoid,
    aten.log_sigmoid_forward.default: log_sigmoid_forward,
    aten.logaddexp.default: logaddexp,
    aten.logaddexp2.default: logaddexp2,
    aten.logcumsumexp.default: logcumsumexp,
    aten.erfc.default: erfc,
    aten.special_erfc.default: erfc,
    aten.special_erfcx.default: erfcx,
    aten.special_log_ndtr.default: log_ndtr,
    aten.special_xlog1py.default: xlog1py,
    aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
}
"""Operator → the form that replaces torch's."""


def _as(number: float, like: Any) -> Any:
    return op.CastLike(op.Constant(value_float=number), like)


def _is_small(x: Any) -> Any:
    return op.Less(op.Abs(x), _as(BELOW_ONE, x))


def _distance(a: Any, b: Any) -> Any:
    """Return |a - b|; 0 for equal infinities."""
    return op.Where(op.Equal(a, b), _as(0.0, a), op.Abs(op.Sub(a, b)))


def _erfcx_of_positive(z: Any) -> Any:
    t = op.Div(_as(2.0, z), op.Add(z, _as(2.0, z)))
    sum_ = _as(ERFC[-1], z)
    for coefficient in reversed(ERFC[:-1]):
        sum_ = op.Add(op.Mul(sum_, t), _as(coefficient, z))
    return op.Mul(t, op.Exp(sum_))
