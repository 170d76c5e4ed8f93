"""ONNX operators of convolution, pooling, normalization and matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.graph.from_onnx.registry import OPERATORS, Node, Unsupported, operator
from compress.graph.from_onnx.shape_tensor import Value, to_number, to_sizes

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def padding(node: Node, sizes: Any, kernel: list[int]) -> tuple[list[int], list[int]]:
    """Return what a convolution or pooling pads before and after each axis of space."""
    n = len(kernel)
    how, given = node.get("auto_pad", "NOTSET"), node.get("pads", [0] * 2 * n)
    if how == "VALID":
        return [0] * n, [0] * n
    if how == "NOTSET":
        return given[:n], given[n:]
    strides, dilations = node.get("strides", [1] * n), node.get("dilations", [1] * n)
    before, after = [], []
    for size, k, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        steps = (size + stride - 1) // stride - 1
        total = torch.sym_max(steps * stride + (k - 1) * dilation + 1 - size, 0)
        half = total // 2
        low, high = (half, total - half) if how == "SAME_UPPER" else (total - half, half)
        before.append(low)
        after.append(high)
    return before, after


def both_sides(before: list[int], after: list[int]) -> list[int]:
    """Return the padding of each axis of space in the order of `F.pad`: the last axis first."""
    axes = reversed(range(len(before)))
    return [size for axis in axes for size in (before[axis], after[axis])]


@operator("Conv")
def convolve(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ONNX's Conv, with any padding."""
    n = weight.ndim - 2
    left, after = padding(node, x.shape[2:], list(weight.shape[2:]))
    if left != after:  # as operators pad both sides alike
        x, left = F.pad(x, both_sides(left, after)), [0] * n
    bias = None if bias is None else bias.reshape(-1)
    strides, dilations = node.get("strides", [1] * n), node.get("dilations", [1] * n)
    return CONVOLUTIONS[n - 1](x, weight, bias, strides, left, dilations, node.get("group", 1))


@operator("ConvTranspose")
def _conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    n, kernel = weight.ndim - 2, list(weight.shape[2:])
    strides, dilations = node.get("strides", [1] * n), node.get("dilations", [1] * n)
    extra, pads = node.get("output_padding", [0] * n), node.get("pads", [0] * 2 * n)
    how, wanted = node.get("auto_pad", "NOTSET"), node.get("output_shape")
    before, after = ([0] * n, [0] * n) if how == "VALID" else (pads[:n], pads[n:])
    if wanted or how.startswith("SAME"):
        wanted = wanted or [size * s for size, s in zip(x.shape[2:], strides, strict=True)]
        axes = zip(x.shape[2:], strides, kernel, dilations, extra, wanted[-n:], strict=True)
        cut = [(size - 1) * s + (k - 1) * d + 1 + e - w for size, s, k, d, e, w in axes]
        before = [c // 2 if how == "SAME_UPPER" else c - c // 2 for c in cut]
        after = [c - b for c, b in zip(cut, before, strict=True)]
    group = node.get("group", 1)
    if before == after:
        return TRANSPOSED[n - 1](x, weight, bias, strides, before, extra, group, dilations)
    y = TRANSPOSED[n - 1](x, weight, bias, strides, 0, extra, group, dilations)
    return F.pad(y, [-v for v in both_sides(before, after)])


def _windows(node: Node) -> tuple[list[int], list[int], list[int]]:
    kernel = node.get("kernel_shape")
    return kernel, node.get("strides", [1] * len(kernel)), node.get("dilations", [1] * len(kernel))


def _ceil_padding(
    x: Tensor, node: Node, before: list[int], after: list[int]
) -> tuple[list[int], list[int]]:
    """Return the padding with what `ceil_mode` adds, whose last window must begin in the input."""
    kernel, strides, dilations = _windows(node)
    if not node.get("ceil_mode"):
        return before, after
    more = []
    for i, size in enumerate(x.shape[2:]):
        span = dilations[i] * (kernel[i] - 1) + 1
        room = size + before[i] + after[i] - span
        count = -(-room // strides[i])
        if (count * strides[i]) >= size + before[i]:
            count -= 1
        more.append(after[i] + max(count * strides[i] - room, 0))
    return before, more


@operator("MaxPool")
def _max_pool(node: Node, x: Tensor) -> Any:
    kernel, strides, dilations = _windows(node)
    n, dtype = len(kernel), x.dtype
    x = x if x.is_floating_point() else x.float()
    before, after = padding(node, x.shape[2:], kernel)
    original = x
    symmetric = before == after and all(2 * b <= k for b, k in zip(before, kernel, strict=True))
    wanted = len(node.outputs) > 1 and bool(node.outputs[1])
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
    if symmetric and not wanted:
        return pool(x, kernel, strides, before, dilations, bool(node.get("ceil_mode"))).to(dtype)
    before, after = _ceil_padding(x, node, before, after)
    x = F.pad(x, both_sides(before, after), value=-math.inf)
    if not wanted:
        return pool(x, kernel, strides, 0, dilations).to(dtype)
    y, place = pool(x, kernel, strides, 0, dilations, return_indices=True)
    if node.get("storage_order"):
        raise Unsupported("indices in column-major order")
    return y.to(dtype), _unpadded(place, x.shape[2:], original.shape, before)


def _unpadded(place: Tensor, padded: Any, shape: Any, before: list[int]) -> Tensor:
    """Return indices into a padded plane as those of ONNX: into the whole input without padding."""
    coordinates = []
    for size in reversed(padded):
        coordinates.append(place % size)
        place = place // size
    flat = torch.zeros_like(coordinates[0])
    for axis, coordinate in enumerate(reversed(coordinates)):
        flat = flat * shape[2 + axis] + coordinate - before[axis]
    planes = torch.arange(shape[0] * shape[1]).reshape(shape[0], shape[1])
    return flat + planes.reshape(planes.shape + (1,) * len(before)) * math.prod(shape[2:])


@operator("AveragePool")
def _average_pool(node: Node, x: Tensor) -> Tensor:
    kernel, strides, dilations = _windows(node)
    n = len(kernel)
    before, after = padding(node, x.shape[2:], kernel)
    with_padding, ceil = bool(node.get("count_include_pad")), bool(node.get("ceil_mode"))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    symmetric = before == after and all(2 * b <= k for b, k in zip(before, kernel, strict=True))
    if symmetric and set(dilations) == {1}:
        return pool(x, kernel, strides, before, ceil, with_padding)
    # A window's mean is its sum by its count of values: a convolution of ones counts them.
    ceil_before, ceil_after = _ceil_padding(x, node, before, after)
    both = both_sides(ceil_before, ceil_after)
    ones = torch.ones_like(x[:1, :1])
    if with_padding:  # what `ceil_mode` adds beyond the padding is not counted
        inner = both_sides(before, after)
        rest = [v for a in reversed(range(n)) for v in (0, ceil_after[a] - after[a])]
        ones = F.pad(F.pad(ones, inner, value=1.0), rest)
    else:
        ones = F.pad(ones, both)
    x = F.pad(x, both)
    weight = torch.ones(x.shape[1], 1, *kernel, dtype=x.dtype, device=x.device)
    total = CONVOLUTIONS[n - 1](x, weight, None, strides, 0, dilations, x.shape[1])
    count = CONVOLUTIONS[n - 1](ones, weight[:1], None, strides, 0, dilations)
    return total / count


@operator("LpPool")
def _lp_pool(node: Node, x: Tensor) -> Tensor:
    p = node.get("p", 2)
    kernel, strides, dilations = _windows(node)
    n = len(kernel)
    before, after = _ceil_padding(x, node, *padding(node, x.shape[2:], kernel))
    x = F.pad(x.abs() ** p, both_sides(before, after))
    weight = torch.ones(x.shape[1], 1, *kernel, dtype=x.dtype, device=x.device)
    return CONVOLUTIONS[n - 1](x, weight, None, strides, 0, dilations, x.shape[1]) ** (1 / p)


@operator("MaxUnpool")
def _max_unpool(node: Node, x: Tensor, place: Tensor, shape: Value | None = None) -> Any:
    kernel, strides, _ = _windows(node)
    n = len(kernel)
    pads = node.get("pads", [0] * 2 * n)
    sizes = [
        (size - 1) * strides[i] - pads[i] - pads[n + i] + kernel[i]
        for i, size in enumerate(x.shape[2:])
    ]
    whole = torch.zeros(math.prod((*x.shape[:2], *sizes)), dtype=x.dtype)
    whole = whole.scatter(0, place.reshape(-1), x.reshape(-1)).reshape(*x.shape[:2], *sizes)
    if shape is None:
        return whole
    wanted = to_sizes(shape)
    missing = [w - s for w, s in zip(wanted[2:], sizes, strict=True)]
    return F.pad(whole, [v for more in reversed(missing) for v in (0, more)])


@operator("BatchNormalization")
def _batch_norm(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> Any:
    if node.get("training_mode"):
        momentum = node.get("momentum", 0.9)
        axes = [0, *range(2, x.ndim)]
        now_mean, now_var = x.mean(axes), x.var(axes, unbiased=False)
        y = F.batch_norm(x, now_mean, now_var, weight, bias, False, 0.0, node.get("epsilon", 1e-5))
        mean = mean * momentum + now_mean * (1 - momentum)
        return y, mean, var * momentum + now_var * (1 - momentum)
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, node.get("epsilon", 1e-5))


@operator("InstanceNormalization")
def _instance_norm(node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=node.get("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(
    node: Node, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Any:
    axis = node.get("axis", -1) % x.ndim
    epsilon = node.get("epsilon", 1e-5)
    if weight is None or list(weight.shape) == list(x.shape[axis:]):
        y = F.layer_norm(x, x.shape[axis:], weight, bias, epsilon)
    else:
        y = F.layer_norm(x, x.shape[axis:], None, None, epsilon) * weight
        y = y if bias is None else y + bias
    if len(node.outputs) == 1:
        return y
    axes = list(range(axis, x.ndim))
    mean, var = x.mean(axes, keepdim=True), x.var(axes, unbiased=False, keepdim=True)
    return y, mean, torch.rsqrt(var + epsilon)


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(node: Node, x: Tensor, weight: Tensor | None = None) -> Tensor:
    axis, epsilon = node.get("axis", -1) % x.ndim, node.get("epsilon", 1e-5)
    if weight is None or list(weight.shape) == list(x.shape[axis:]):
        return F.rms_norm(x, x.shape[axis:], weight, epsilon)
    return F.rms_norm(x, x.shape[axis:], None, epsilon) * weight


@operator("LRN")
def _lrn(node: Node, x: Tensor) -> Tensor:
    size = node.get("size")
    square = (x * x).unsqueeze(1)
    pads = [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size // 2]
    square = F.pad(square, pads)
    total = square.unfold(2, size, 1).sum(-1).squeeze(1)
    bias, alpha, beta = node.get("bias", 1.0), node.get("alpha", 1e-4), node.get("beta", 0.75)
    return x / (bias + alpha / size * total) ** beta


@operator("Dropout")
def _dropout(
    node: Node, x: Tensor, ratio: Value | None = None, training: Value | None = None
) -> Any:
    if training is not None and to_number(training) and (ratio is None or to_number(ratio)):
        raise Unsupported("in training mode")
    if len(node.outputs) == 1:
        return x
    return x, torch.ones_like(x, dtype=torch.bool)


@operator("Gemm")
def _gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.t() if node.get("transA") else a
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    weight = b if node.get("transB") else b.t()
    is_bias = c is None or (beta == 1 and tuple(c.shape) == (weight.shape[0],))
    if alpha == 1 and is_bias and a.is_floating_point():
        return F.linear(a, weight, c)
    y = (a @ weight.t()) * alpha if alpha != 1 else a @ weight.t()
    return y if c is None else y + (c * beta if beta != 1 else c)


@operator("MatMul")
def _matmul(node: Node, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.matmul(a, b)
    return product if bias is None else product + bias


@operator("ScaledDotProductAttention")
def _attention(
    node: Node, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    is_causal = bool(node.get("is_causal"))
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=node.get("scale")
    )


@operator("Col2Im")
def _col2im(node: Node, x: Tensor, image: Value, block: Value) -> Tensor:
    sizes, kernel = tuple(to_sizes(image)), tuple(to_sizes(block))
    n = len(sizes)
    pads, strides = node.get("pads", [0] * 2 * n), node.get("strides", [1] * n)
    dilations = node.get("dilations", [1] * n)
    if n != 2 or pads[:n] != pads[n:]:
        raise Unsupported(f"of {n} axes" if n != 2 else "with unequal padding")
    return F.fold(x, sizes, kernel, dilations, pads[:n], strides)


OPERATORS |= {
    "GlobalAveragePool": lambda node, x: (
        F.adaptive_avg_pool2d(x, 1) if x.ndim == 4 else x.mean([*range(2, x.ndim)], keepdim=True)
    ),
    "GlobalMaxPool": lambda node, x: x.amax([*range(2, x.ndim)], keepdim=True),
    "GlobalLpPool": lambda node, x: torch.linalg.vector_norm(
        x, node.get("p", 2), [*range(2, x.ndim)], keepdim=True
    ),
}
