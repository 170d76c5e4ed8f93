"""ONNX operators that compute each element by itself, and reductions."""

from __future__ import annotations

import math
import operator as op
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.graph.from_onnx.registry import OPERATORS, Node, Unsupported, operator
from compress.graph.from_onnx.shape_tensor import ShapeTensor, Value, to_number, to_sizes, to_tensor

DTYPES = {
    **{1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16},
    **{6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64},
    **{12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128},
    16: torch.bfloat16,
}
"""ONNX's number of an element type → PyTorch's type."""
SAME_NAME = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Det"),
    *("Erf", "Exp", "Floor", "IsNaN", "Log", "Neg", "Round", "Sigmoid", "Sign", "Sin", "Sinh"),
    *("Sqrt", "Tan", "Tanh"),
)
"""Operators that PyTorch has by the same name."""
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in SAME_NAME},
    **{"Relu": F.relu, "Softplus": F.softplus, "Softsign": F.softsign, "Mish": F.mish},
    **{"HardSwish": F.hardswish, "Not": torch.logical_not, "BitwiseNot": torch.bitwise_not},
    **{"Reciprocal": torch.reciprocal, "Identity": lambda x: x},
}
ON_SIZES: dict[str, Callable[[Any], Any]] = {
    "Neg": op.neg,
    "Abs": abs,
    "Floor": math.floor,
    "Ceil": math.ceil,
    "Identity": lambda v: v,
    "Not": op.not_,
    "Sqrt": lambda v: torch.sym_sqrt(v) if isinstance(v, torch.SymFloat) else math.sqrt(v),
}


def _unary(name: str, node: Node, x: Value) -> Value:
    if isinstance(x, ShapeTensor) and name in ON_SIZES:
        sizes = x.map(ON_SIZES[name])
        # Python's floor and ceil return integers.
        return sizes.map(torch.sym_float) if name in ("Floor", "Ceil") else sizes
    return UNARY[name](to_tensor(x))


OPERATORS |= {name: partial(_unary, name) for name in UNARY}


def _divide(x: Any, y: Any) -> Any:
    # ONNX's division of integers truncates; that of sizes, which are not negative, may floor.
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        tensor = x if isinstance(x, Tensor) else y
        whole = not tensor.is_floating_point()
        return torch.div(x, y, rounding_mode="trunc" if whole else None)
    if isinstance(x, float | torch.SymFloat) or isinstance(y, float | torch.SymFloat):
        return x / y
    if isinstance(x, int) and isinstance(y, int):
        return x // y if (x < 0) == (y < 0) else -(-x // y)
    return x // y


def _bit_shift(node: Node, x: Value, y: Value) -> Tensor:
    # Of uint16 and wider unsigned integers torch shifts none on CPUs.
    x, y = to_tensor(x), to_tensor(y)
    wide = x.to(torch.int64)
    shifted = wide << y.long() if node.get("direction") == "LEFT" else wide >> y.long()
    return shifted.to(x.dtype)


OPERATORS["BitShift"] = _bit_shift
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{"Add": op.add, "Sub": op.sub, "Mul": op.mul, "Div": _divide},
    **{"And": op.and_, "Or": op.or_, "Xor": op.xor},
    **{"BitwiseAnd": op.and_, "BitwiseOr": op.or_, "BitwiseXor": op.xor},
    **{"Equal": op.eq, "Greater": op.gt, "Less": op.lt},
    **{"GreaterOrEqual": op.ge, "LessOrEqual": op.le},
}
COMPARISONS = {"Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"}


def _operands(*values: Value) -> list[Any]:
    """Return tensors, and Python numbers for constants of one entry that broadcast to them."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    ndim = max((t.ndim for t in tensors), default=-1)
    device = tensors[0].device if tensors else None

    def operand(value: Value) -> Any:
        if not isinstance(value, ShapeTensor):
            return value
        if tensors and len(value.values) == 1 and ndim >= value.ndim:
            return value.values[0]
        return value.tensor(device)

    return [operand(v) for v in values]


def _binary(name: str, node: Node, x: Value, y: Value) -> Value:
    if isinstance(x, ShapeTensor) and isinstance(y, ShapeTensor):
        return x.map(BINARY[name], y, dtype=torch.bool if name in COMPARISONS else None)
    if node.opset < 7 and node.get("broadcast") and "axis" in node.attributes:
        x, y = to_tensor(x), to_tensor(y)
        y = y.reshape(y.shape + (1,) * (x.ndim - node.get("axis") - y.ndim))
    return BINARY[name](*_operands(x, y))


OPERATORS |= {name: partial(_binary, name) for name in BINARY}


@operator("Pow")
def _pow(node: Node, x: Value, y: Value) -> Value:
    if isinstance(x, ShapeTensor) and isinstance(y, ShapeTensor):
        return x.map(op.pow, y)
    dtype = x.dtype
    return torch.pow(*_operands(x, y)).to(dtype)


@operator("Mod")
def _mod(node: Node, x: Value, y: Value) -> Value:
    if isinstance(x, ShapeTensor) and isinstance(y, ShapeTensor):
        return x.map(op.mod, y)
    x, y = _operands(x, y)
    if node.get("fmod"):
        return torch.fmod(x, y)
    wide = isinstance(x, Tensor) and x.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return torch.remainder(x.long(), y.long()).to(x.dtype) if wide else torch.remainder(x, y)


def _folded(name: str, function: Callable[..., Any], node: Node, *values: Value) -> Value:
    pairs = {"Max": torch.sym_max, "Min": torch.sym_min, "Sum": op.add}
    if name in pairs and all(isinstance(v, ShapeTensor) for v in values):
        return reduce(lambda x, y: x.map(pairs[name], y), values)
    tensors = [to_tensor(v) for v in values]
    total = reduce(function, tensors)
    return total / len(tensors) if name == "Mean" else total


FOLDED: dict[str, Any] = {"Max": torch.maximum, "Min": torch.minimum}
FOLDED |= dict.fromkeys(("Sum", "Mean"), torch.add)
OPERATORS |= {name: partial(_folded, name, function) for name, function in FOLDED.items()}


@operator("Where")
def _where(node: Node, condition: Value, x: Value, y: Value) -> Value:
    if all(isinstance(v, ShapeTensor) for v in (condition, x, y)):
        return x.map(lambda a, c, b: a if c else b, condition, y)
    return torch.where(to_tensor(condition), to_tensor(x), to_tensor(y))


@operator("Clip")
def _clip(node: Node, x: Tensor, low: Value | None = None, high: Value | None = None) -> Value:
    low = node.get("min") if low is None else low
    high = node.get("max") if high is None else high
    limits = [v.values[0] if isinstance(v, ShapeTensor) else v for v in (low, high)]
    if all(v is None for v in limits):
        return x
    if limits[0] == 0 and limits[1] is None:
        return F.relu(x)
    if limits == [0, 6]:
        return F.relu6(x)
    for limit, bound in zip(limits, (torch.maximum, torch.minimum), strict=True):
        if isinstance(limit, Tensor):
            x = bound(x, limit)
    numbers = [None if isinstance(v, Tensor) else v for v in limits]
    return x if all(v is None for v in numbers) else torch.clamp(x, *numbers)


@operator("Cast")
def _cast(node: Node, x: Value) -> Value:
    if node.get("to") not in DTYPES:
        raise Unsupported(f"to element type {node.get('to')}")
    return cast(x, DTYPES[node.get("to")])


def cast(x: Value, dtype: torch.dtype) -> Value:
    """Convert to another element type, as ONNX's Cast does."""
    if not isinstance(x, ShapeTensor):
        if dtype in (torch.uint16, torch.uint32) and x.is_floating_point():
            x = x.long()
        return x.to(dtype)
    if dtype.is_floating_point:
        return x.map(torch.sym_float, dtype=dtype)
    if dtype == torch.bool:
        return x.map(bool, dtype=dtype)
    return x.map(lambda v: int(v) if isinstance(v, float | bool) else torch.sym_int(v), dtype=dtype)


ACTIVATIONS: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "LeakyRelu": lambda n, x: F.leaky_relu(x, n.get("alpha", 0.01)),
    "Elu": lambda n, x: F.elu(x, n.get("alpha", 1.0)),
    "HardSigmoid": lambda n, x: _hard_sigmoid(x, n.get("alpha", 0.2), n.get("beta", 0.5)),
    "Gelu": lambda n, x: F.gelu(x, approximate=n.get("approximate", "none")),
    "Swish": lambda n, x: (
        F.silu(x) if n.get("alpha", 1.0) == 1 else x * (x * n.get("alpha")).sigmoid()
    ),
    "Softmax": lambda n, x: _softmax(F.softmax, n, x),
    "LogSoftmax": lambda n, x: _softmax(F.log_softmax, n, x),
    "Hardmax": lambda n, x: _softmax(_hardmax, n, x),
    "Selu": lambda n, x: (
        n.get("gamma", 1.0507009873554805) * F.elu(x, n.get("alpha", 1.6732632423543772))
    ),
    "Shrink": lambda n, x: torch.where(
        x.abs() > n.get("lambd", 0.5), x - x.sign() * n.get("bias", 0.0), 0
    ).to(x.dtype),
    "ThresholdedRelu": lambda n, x: F.threshold(x, n.get("alpha", 1.0), 0.0),
}
OPERATORS |= ACTIVATIONS


def _hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    if beta == 0.5:
        # An operator in every runtime, where others are a product, a sum and a clamp.
        return F.hardsigmoid(x if abs(alpha - 1 / 6) < 1e-6 else x * (6 * alpha))
    return torch.clamp(alpha * x + beta, 0, 1)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    hot = F.one_hot(x.argmax(axis), x.shape[axis]).to(x.dtype)
    return hot.movedim(-1, axis)


def _softmax(function: Callable[..., Tensor], node: Node, x: Tensor) -> Tensor:
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    axis = node.get("axis", 1) % x.ndim
    if axis == x.ndim - 1:
        return function(x, axis)
    # Before opset 13 all axes from the given one on are one.
    return function(x.flatten(axis), axis).reshape(x.shape)


@operator("PRelu")
def _prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    if x.ndim > 2 and slope.shape == (x.shape[1],) + (1,) * (x.ndim - 2):
        return F.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, x * slope, x)


def _axes(node: Node, axes: Value | None, x: Tensor) -> list[int] | None:
    given = node.get("axes") if axes is None else to_sizes(axes)
    if given:
        return list(given)
    return None if node.get("noop_with_empty_axes") else list(range(x.ndim))


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _log_sum_exp(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.logsumexp(x if x.is_floating_point() else x.float(), axes, keep)


REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": lambda x, d, k: x.sum(d, k, dtype=x.dtype),
    "ReduceMean": lambda x, d, k: x.mean(d, k),
    "ReduceMax": lambda x, d, k: _extreme(torch.amax, x, d, k),
    "ReduceMin": lambda x, d, k: _extreme(torch.amin, x, d, k),
    "ReduceProd": _prod,
    "ReduceL1": lambda x, d, k: x.abs().sum(d, k, dtype=x.dtype),
    "ReduceL2": lambda x, d, k: (x * x).sum(d, k, dtype=x.dtype).sqrt(),
    "ReduceLogSum": lambda x, d, k: x.sum(d, k).log(),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceSumSquare": lambda x, d, k: (x * x).sum(d, k, dtype=x.dtype),
}


def _extreme(function: Callable[..., Tensor], x: Tensor, axes: list[int], keep: bool) -> Any:
    if x.numel() == 0:
        low = function is torch.amax
        shape = [1 if i in {a % x.ndim for a in axes} else n for i, n in enumerate(x.shape)]
        full = torch.full(shape, -math.inf if low else math.inf, dtype=x.dtype, device=x.device)
        return full if keep else full.squeeze([a % x.ndim for a in axes])
    return function(x, axes, keep)


def _reduction(name: str, node: Node, x: Value, axes: Value | None = None) -> Value:
    if isinstance(x, ShapeTensor) and name in ("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin"):
        pairs = {"ReduceProd": op.mul, "ReduceSum": op.add}
        pairs |= {"ReduceMax": torch.sym_max, "ReduceMin": torch.sym_min}
        return ShapeTensor((reduce(pairs[name], x.values),), bool(node.get("keepdims", 1)), x.dtype)
    x = to_tensor(x)
    dims = _axes(node, axes, x)
    if dims is None:  # no axis is reduced, and the elements are computed as if each were alone
        return REDUCTIONS[name](x.unsqueeze(0), [0], False)
    return REDUCTIONS[name](x, dims, bool(node.get("keepdims", 1))) if dims else x


OPERATORS |= {name: partial(_reduction, name) for name in REDUCTIONS}


@operator("CumSum", "CumProd")
def _cumulative(node: Node, x: Tensor, axis: Value) -> Tensor:
    dim, identity = to_number(axis), 0 if node.operator == "CumSum" else 1
    function = torch.cumsum if node.operator == "CumSum" else torch.cumprod
    x = x.flip(dim) if node.get("reverse") else x
    total = function(x, dim).to(x.dtype)
    if node.get("exclusive"):
        first = torch.full_like(total.narrow(dim, 0, 1), identity)
        total = torch.cat([first, total.narrow(dim, 0, x.shape[dim] - 1)], dim)
    return total.flip(dim) if node.get("reverse") else total


@operator("TopK")
def _top_k(node: Node, x: Tensor, k: Value | None = None) -> tuple[Tensor, ...]:
    count = node.get("k") if k is None else to_number(k)
    axis, largest = node.get("axis", -1), bool(node.get("largest", 1))
    # Of equal values ONNX takes the one with the lower index first.
    unsigned = x.dtype in (torch.uint16, torch.uint32, torch.uint64)
    ordered = x.long() if unsigned else x
    values, indices = torch.sort(ordered, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count).to(x.dtype), indices.narrow(axis, 0, count)


@operator("LpNormalization")
def _lp_normalization(node: Node, x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, node.get("p", 2), node.get("axis", -1), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


def _arg(function: Callable[..., Tensor], node: Node, x: Tensor) -> Tensor:
    axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
    if node.get("select_last_index"):
        return x.shape[axis] - 1 - function(x.flip(axis), axis, keep)
    return function(x, axis, keep)


def _is_infinite(x: Tensor, negative: int, positive: int) -> Tensor:
    return torch.isinf(x) & ((x < 0) & bool(negative) | (x > 0) & bool(positive))


def _triangle(x: Tensor, upper: int, k: Value | None) -> Tensor:
    return (torch.triu if upper else torch.tril)(x, 0 if k is None else to_number(k))


OPERATORS |= {
    "ArgMax": partial(_arg, torch.argmax),
    "ArgMin": partial(_arg, torch.argmin),
    "BitCast": lambda node, x: to_tensor(x).view(DTYPES[node.get("to")]),
    "CastLike": lambda node, x, like: cast(x, like.dtype),
    "Einsum": lambda node, *x: torch.einsum(node.get("equation").replace(" ", ""), *x),
    "IsInf": lambda n, x: _is_infinite(x, n.get("detect_negative", 1), n.get("detect_positive", 1)),
    "Trilu": lambda node, x, k=None: _triangle(x, node.get("upper", 1), k),
}
