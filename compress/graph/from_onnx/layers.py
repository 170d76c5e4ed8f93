"""ONNX operators of convolution, pooling, normalization, resizing, recurrence and quantization."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from compress.graph.from_onnx.elementwise import DTYPES
from compress.graph.from_onnx.registry import Node, Unsupported, operator
from compress.graph.from_onnx.shape_tensor import Value, to_number, to_sizes, to_tensor

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def padding(node: Node, sizes: Any, kernel: list[int]) -> tuple[list[int], list[int]]:
    """Return what is padded before and after each axis of space.

    Args:
        node: a convolution or pooling.
        sizes: of the input's axes of space.
        kernel: the kernel's sizes.
    """
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


def pad_(x: torch.Tensor, before: list[int], after: list[int], fill: float = 0.0) -> Any:
    """Return the padded input where both sides differ, and the padding that is left to an operator."""
    if before == after:
        return x, before
    both = [n for axis in reversed(range(len(before))) for n in (before[axis], after[axis])]
    return F.pad(x, both, value=fill), [0] * len(before)


@operator("Conv")
def _conv(node: Node, x: torch.Tensor, weight: Value, bias: Value | None = None) -> torch.Tensor:
    weight = to_tensor(weight)
    n = weight.ndim - 2
    x, left = pad_(x, *padding(node, x.shape[2:], list(weight.shape[2:])))
    bias = None if bias is None else to_tensor(bias)
    strides, dilations = node.get("strides", [1] * n), node.get("dilations", [1] * n)
    return CONVOLUTIONS[n - 1](x, weight, bias, strides, left, dilations, node.get("group", 1))


@operator("ConvTranspose")
def _conv_transpose(
    node: Node, x: torch.Tensor, weight: Value, bias: Value | None = None
) -> torch.Tensor:
    weight = to_tensor(weight)
    n, kernel = weight.ndim - 2, list(weight.shape[2:])
    strides, dilations = node.get("strides", [1] * n), node.get("dilations", [1] * n)
    extra, pads = node.get("output_padding", [0] * n), node.get("pads", [0] * 2 * n)
    full = [
        (size - 1) * s + (k - 1) * d + 1 + e
        for size, s, k, d, e in zip(x.shape[2:], strides, kernel, dilations, extra, strict=True)
    ]
    how = node.get("auto_pad", "NOTSET")
    if wanted := node.get("output_shape"):
        cut = [f - w for f, w in zip(full, wanted[-n:], strict=True)]
    elif how in ("SAME_UPPER", "SAME_LOWER"):
        cut = [f - size * s for f, size, s in zip(full, x.shape[2:], strides, strict=True)]
    elif how == "VALID":
        cut, pads = [0] * n, [0] * 2 * n
    else:
        cut = [pads[i] + pads[n + i] for i in range(n)]
    if node.get("output_shape") or how.startswith("SAME"):
        lower = how == "SAME_UPPER"
        before = [c // 2 if lower else c - c // 2 for c in cut]
        after = [c - b for c, b in zip(cut, before, strict=True)]
    else:
        before, after = pads[:n], pads[n:]
    bias = None if bias is None else to_tensor(bias)
    group = node.get("group", 1)
    if before == after:
        return TRANSPOSED[n - 1](x, weight, bias, strides, before, extra, group, dilations)
    y = TRANSPOSED[n - 1](x, weight, bias, strides, 0, extra, group, dilations)
    both = [-v for axis in reversed(range(n)) for v in (before[axis], after[axis])]
    return F.pad(y, both)


def _windows(x: torch.Tensor, node: Node) -> tuple[list[int], list[int], list[int]]:
    kernel = node.get("kernel_shape")
    return kernel, node.get("strides", [1] * len(kernel)), node.get("dilations", [1] * len(kernel))


def _ceil_padding(
    x: torch.Tensor, node: Node, before: list[int], after: list[int]
) -> tuple[list[int], list[int]]:
    """Return the padding with what `ceil_mode` adds, whose last window must begin in the input."""
    kernel, strides, dilations = _windows(x, node)
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
def _max_pool(node: Node, x: torch.Tensor) -> Any:
    kernel, strides, dilations = _windows(x, node)
    n, dtype = len(kernel), x.dtype
    x = x if x.is_floating_point() else x.float()
    before, after = padding(node, x.shape[2:], kernel)
    original = x
    symmetric = before == after and all(2 * b <= k for b, k in zip(before, kernel, strict=True))
    wanted = len(node.outputs) > 1 and bool(node.outputs[1])
    ceil = bool(node.get("ceil_mode"))
    if symmetric and not wanted:
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        return pool(x, kernel, strides, before, dilations, ceil).to(dtype)
    before, after = _ceil_padding(x, node, before, after)
    both = [v for axis in reversed(range(n)) for v in (before[axis], after[axis])]
    x = F.pad(x, both, value=-math.inf)
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
    if not wanted:
        return pool(x, kernel, strides, 0, dilations).to(dtype)
    y, place = pool(x, kernel, strides, 0, dilations, return_indices=True)
    if node.get("storage_order"):
        raise Unsupported("indices in column-major order")
    return y.to(dtype), _unpadded(place, x.shape[2:], original.shape, before)


def _unpadded(place: torch.Tensor, padded: Any, shape: Any, before: list[int]) -> torch.Tensor:
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
def _average_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    return _mean_of_windows(node, x)


def _mean_of_windows(node: Node, x: torch.Tensor) -> torch.Tensor:
    kernel, strides, dilations = _windows(x, node)
    n = len(kernel)
    before, after = padding(node, x.shape[2:], kernel)
    with_padding, ceil = bool(node.get("count_include_pad")), bool(node.get("ceil_mode"))
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    symmetric = before == after and all(2 * b <= k for b, k in zip(before, kernel, strict=True))
    if symmetric and set(dilations) == {1}:
        return pool(x, kernel, strides, before, ceil, with_padding)
    # A window's mean is its sum by its count of values: a convolution of ones counts them.
    ceil_before, ceil_after = _ceil_padding(x, node, before, after)
    both = [v for a in reversed(range(n)) for v in (ceil_before[a], ceil_after[a])]
    ones = torch.ones_like(x[:1, :1])
    if with_padding:  # what `ceil_mode` adds beyond the padding is not counted
        inner = [v for a in reversed(range(n)) for v in (before[a], after[a])]
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
def _lp_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    p = node.get("p", 2)
    kernel, strides, dilations = _windows(x, node)
    n = len(kernel)
    before, after = _ceil_padding(x, node, *padding(node, x.shape[2:], kernel))
    both = [v for a in reversed(range(n)) for v in (before[a], after[a])]
    x = F.pad(x.abs() ** p, both)
    weight = torch.ones(x.shape[1], 1, *kernel, dtype=x.dtype, device=x.device)
    return CONVOLUTIONS[n - 1](x, weight, None, strides, 0, dilations, x.shape[1]) ** (1 / p)


@operator("GlobalAveragePool")
def _global_average_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    if x.ndim == 4:
        return F.adaptive_avg_pool2d(x, 1)
    return x.mean(list(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    return x.amax(list(range(2, x.ndim)), keepdim=True)


@operator("GlobalLpPool")
def _global_lp_pool(node: Node, x: torch.Tensor) -> torch.Tensor:
    axes = list(range(2, x.ndim))
    return torch.linalg.vector_norm(x, node.get("p", 2), axes, keepdim=True)


@operator("MaxUnpool")
def _max_unpool(node: Node, x: torch.Tensor, place: torch.Tensor, shape: Value | None = None) -> Any:
    kernel, strides, _ = _windows(x, node)
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
def _batch_norm(node: Node, x: torch.Tensor, *rest: Value) -> Any:
    weight, bias, mean, var = (to_tensor(v) for v in rest)
    if node.get("training_mode"):
        momentum = node.get("momentum", 0.9)
        axes = [0, *range(2, x.ndim)]
        now_mean, now_var = x.mean(axes), x.var(axes, unbiased=False)
        y = F.batch_norm(x, now_mean, now_var, weight, bias, False, 0.0, node.get("epsilon", 1e-5))
        mean = mean * momentum + now_mean * (1 - momentum)
        return y, mean, var * momentum + now_var * (1 - momentum)
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, node.get("epsilon", 1e-5))


@operator("InstanceNormalization")
def _instance_norm(node: Node, x: torch.Tensor, weight: Value, bias: Value) -> torch.Tensor:
    weight, bias = to_tensor(weight), to_tensor(bias)
    return F.instance_norm(x, weight=weight, bias=bias, eps=node.get("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(node: Node, x: torch.Tensor, weight: Value, bias: Value | None = None) -> Any:
    axis = node.get("axis", -1) % x.ndim
    epsilon = node.get("epsilon", 1e-5)
    weight, bias = to_tensor(weight), None if bias is None else to_tensor(bias)
    if list(weight.shape) == list(x.shape[axis:]):
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
def _rms_norm(node: Node, x: torch.Tensor, weight: Value) -> torch.Tensor:
    axis = node.get("axis", -1) % x.ndim
    weight, epsilon = to_tensor(weight), node.get("epsilon", 1e-5)
    if list(weight.shape) == list(x.shape[axis:]):
        return F.rms_norm(x, x.shape[axis:], weight, epsilon)
    return F.rms_norm(x, x.shape[axis:], None, epsilon) * weight


@operator("LRN")
def _lrn(node: Node, x: torch.Tensor) -> torch.Tensor:
    size = node.get("size")
    square = (x * x).unsqueeze(1)
    pads = [0, 0] * (x.ndim - 2) + [(size - 1) // 2, size // 2]
    square = F.pad(square, pads)
    total = square.unfold(2, size, 1).sum(-1).squeeze(1)
    bias, alpha, beta = node.get("bias", 1.0), node.get("alpha", 1e-4), node.get("beta", 0.75)
    return x / (bias + alpha / size * total) ** beta


@operator("Dropout")
def _dropout(node: Node, x: torch.Tensor, ratio: Value | None = None, training: Value | None = None) -> Any:
    if training is not None and to_number(training) and (ratio is None or to_number(ratio)):
        raise Unsupported("in training mode")
    if len(node.outputs) == 1:
        return x
    return x, torch.ones_like(x, dtype=torch.bool)


@operator("Gemm")
def _gemm(node: Node, a: torch.Tensor, b: Value, c: Value | None = None) -> torch.Tensor:
    a, b = to_tensor(a), to_tensor(b)
    a = a.t() if node.get("transA") else a
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    weight = b if node.get("transB") else b.t()
    c = None if c is None else to_tensor(c)
    if alpha == 1 and (c is None or (beta == 1 and c.ndim == 1)) and a.is_floating_point():
        if c is None or c.shape[0] == weight.shape[0]:
            return F.linear(a, weight, c)
    y = (a @ weight.t()) * alpha if alpha != 1 else a @ weight.t()
    return y if c is None else y + (c * beta if beta != 1 else c)


@operator("MatMul")
def _matmul(node: Node, a: Value, b: Value) -> torch.Tensor:
    return torch.matmul(to_tensor(a), to_tensor(b))


@operator("Upsample", "Resize")
def _resize(node: Node, x: torch.Tensor, *rest: Value | None) -> torch.Tensor:
    if node.operator == "Upsample":
        scales = node.get("scales") if not rest else _floats(rest[0])
        return _interpolate(node, x, scales, None, "asymmetric", "floor")
    roi, scales, sizes = (*rest, None, None, None)[:3]
    if node.opset < 11:
        return _interpolate(node, x, _floats(roi), None, "asymmetric", "floor")
    coordinates = node.get("coordinate_transformation_mode", "half_pixel")
    nearest = node.get("nearest_mode", "round_prefer_floor")
    given = None if scales is None else _floats(scales)
    wanted = None if sizes is None else to_sizes(sizes)
    window = None if roi is None else _floats(roi)
    return _interpolate(node, x, given or None, wanted or None, coordinates, nearest, window)


def _floats(value: Value) -> list[Any]:
    if isinstance(value, torch.Tensor) and value.numel() == 0:
        return []
    return to_sizes(value)


def _interpolate(
    node: Node,
    x: torch.Tensor,
    scales: list[Any] | None,
    sizes: list[Any] | None,
    coordinates: str,
    nearest: str,
    window: list[float] | None = None,
) -> torch.Tensor:
    mode, n = node.get("mode", "nearest"), x.ndim
    axes = [axis % n for axis in node.get("axes", range(n))]
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if sizes is not None and policy != "stretch":
        choose = min if policy == "not_larger" else max
        ratio = choose(size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True))
        sizes = [int(math.floor(x.shape[axis] * ratio + 0.5)) for axis in axes]
        scales = [ratio] * len(axes)
    elif sizes is not None:
        scales = [size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    else:
        sizes = [_floor(x.shape[axis] * scale) for axis, scale in zip(axes, scales, strict=True)]
    moved = [
        (a, s, r, i)
        for i, (a, s, r) in enumerate(zip(axes, sizes, scales, strict=True))
        if not (isinstance(r, int | float) and r == 1 and coordinates != "tf_crop_and_resize")
    ]
    spatial = [a for a, *_ in moved]
    if not node.get("antialias") and spatial and min(spatial) >= 2:
        known = _torch_mode(mode, coordinates, nearest, n - 2, node, sizes)
        if known and n in (3, 4, 5):
            target = list(x.shape[2:])
            for axis, size, _, _ in moved:
                target[axis - 2] = size
            exact = all(isinstance(s, int) and abs(x.shape[a] * r - s) < 1e-6 for a, s, r, _ in moved) or (
                node.operator == "Resize" and len(node.inputs) > 3 and bool(node.inputs[3])
            ) or all(isinstance(r, int | float) and float(r).is_integer() for _, _, r, _ in moved)
            if exact:
                kind, aligned = known
                return F.interpolate(x, target, mode=kind, align_corners=aligned)
    for axis, size, scale, place in moved:
        part = None if window is None else (window[place], window[len(axes) + place])
        x = _resample(node, x, axis, size, scale, coordinates, nearest, part)
    return x


def _floor(value: Any) -> Any:
    return math.floor(value + 1e-9) if isinstance(value, int | float) else torch.sym_int(value)


def _torch_mode(
    mode: str, coordinates: str, nearest: str, axes: int, node: Node, sizes: list[Any]
) -> Any:
    """Return the mode of `F.interpolate`, and `align_corners`, that computes the same; else None."""
    if mode == "nearest" and coordinates == "asymmetric" and nearest == "floor":
        return "nearest", None
    if coordinates == "pytorch_half_pixel" and any(isinstance(s, int) and s == 1 for s in sizes):
        return None  # where this takes the first element, and torch the middle
    aligned = {"align_corners": True, "half_pixel": False, "pytorch_half_pixel": False}.get(coordinates)
    if mode == "linear" and aligned is not None:
        return ("linear", "bilinear", "trilinear")[axes - 1], aligned
    is_torch_cubic = node.get("cubic_coeff_a", -0.75) == -0.75 and not node.get("exclude_outside")
    if mode == "cubic" and aligned is not None and axes == 2 and is_torch_cubic:
        return "bicubic", aligned
    return None


def _resample(
    node: Node,
    x: torch.Tensor,
    axis: int,
    size: Any,
    scale: Any,
    coordinates: str,
    nearest: str,
    window: tuple[float, float] | None,
) -> torch.Tensor:
    """Resize one axis by a matrix of weights, as ONNX defines them for each mode."""
    length, out = x.shape[axis], torch.arange(size, dtype=torch.float64)
    half = (out + 0.5) / scale - 0.5
    if coordinates == "asymmetric":
        at = out / scale
    elif coordinates == "align_corners":
        whole = length * scale  # of which the last element is the last of the input
        at = out * (length - 1) / (whole - 1) if whole > 1 else torch.zeros_like(out)
    elif coordinates == "pytorch_half_pixel":
        at = half if size > 1 else torch.zeros_like(out)
    elif coordinates == "half_pixel_symmetric":
        adjust = size / (length * scale)
        at = length / 2 * (1 - adjust) + half
    elif coordinates == "tf_crop_and_resize":
        start, end = window or (0.0, 1.0)
        span = end - start
        ends = start * (length - 1) + out * span * (length - 1) / max(size - 1, 1)
        at = ends if size > 1 else torch.full_like(out, 0.5 * (start + end) * (length - 1))
    else:
        at = half
    places = torch.arange(length, dtype=torch.float64)
    distance = at[:, None] - places[None]
    mode = node.get("mode", "nearest")
    if mode == "nearest":
        rounded = {
            "floor": torch.floor(at),
            "ceil": torch.ceil(at),
            "round_prefer_ceil": torch.floor(at + 0.5),
        }.get(nearest, torch.ceil(at - 0.5))
        y = x.index_select(axis, rounded.clamp(0, length - 1).long())
        return _extrapolated(node, y, axis, at, length, coordinates)
    stretch = min(scale, 1.0) if node.get("antialias") else 1.0
    weights = _kernel(mode, distance, stretch, node)
    reach = (2 if mode == "cubic" else 1) / stretch
    if not node.get("exclude_outside"):  # what lies beyond the ends counts for the nearest element
        steps = int(math.ceil(reach)) + 1
        low, high = int(min(at.min().item(), 0)) - steps, int(max(at.max().item(), length)) + steps
        wide = torch.arange(low, high + 1, dtype=torch.float64)
        weights = _kernel(mode, at[:, None] - wide[None], stretch, node)
        target = wide.clamp(0, length - 1).long()
        weights = torch.zeros(len(out), length, dtype=torch.float64).index_add(1, target, weights)
    weights = weights / weights.sum(1, keepdim=True)
    y = torch.tensordot(x.movedim(axis, -1), weights.to(x.dtype), dims=([-1], [1]))
    return _extrapolated(node, y.movedim(-1, axis), axis, at, length, coordinates)


def _extrapolated(
    node: Node, y: torch.Tensor, axis: int, at: torch.Tensor, length: int, coordinates: str
) -> torch.Tensor:
    if coordinates != "tf_crop_and_resize":
        return y
    outside = ((at < 0) | (at > length - 1)).reshape((-1,) + (1,) * (y.ndim - 1 - axis))
    return torch.where(outside, node.get("extrapolation_value", 0.0), y)


def _kernel(mode: str, distance: torch.Tensor, stretch: float, node: Node) -> torch.Tensor:
    distance = (distance * stretch).abs()
    if mode == "linear":
        return (1 - distance).clamp(min=0)
    a = node.get("cubic_coeff_a", -0.75)
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


@operator("GridSample")
def _grid_sample(node: Node, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(node.get("mode", "linear"), node.get("mode", "bilinear"))
    return F.grid_sample(
        x, grid, mode, node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0))
    )


@operator("Col2Im")
def _col2im(node: Node, x: torch.Tensor, image: Value, block: Value) -> torch.Tensor:
    sizes, kernel = to_sizes(image), to_sizes(block)
    n = len(sizes)
    pads, strides = node.get("pads", [0] * 2 * n), node.get("strides", [1] * n)
    dilations = node.get("dilations", [1] * n)
    if n != 2 or pads[:n] != pads[n:]:
        raise Unsupported(f"of {n} axes" if n != 2 else "with unequal padding")
    return F.fold(x, sizes, kernel, dilations, pads[:n], strides)


def _gates(node: Node, count: int) -> int:
    if node.get("direction", "forward") == "bidirectional":
        return 2
    return 1 * count


@operator("LSTM", "GRU", "RNN")
def _recurrent(node: Node, x: torch.Tensor, w: Value, r: Value, *rest: Value | None) -> Any:
    bias, lengths, hidden, cell, peepholes = (*rest, None, None, None, None, None)[:5]
    if node.get("layout"):
        x = x.transpose(0, 1)
        hidden = None if hidden is None else to_tensor(hidden).transpose(0, 1)
        cell = None if cell is None else to_tensor(cell).transpose(0, 1)
    if lengths is not None:
        raise Unsupported("with lengths of sequences")
    w, r = to_tensor(w), to_tensor(r)
    way = node.get("direction", "forward")
    outputs, states, cells = [], [], []
    for d in range(w.shape[0]):
        backward = way == "reverse" or d == 1
        b = None if bias is None else to_tensor(bias)[d]
        h = None if hidden is None else to_tensor(hidden)[d]
        c = None if cell is None else to_tensor(cell)[d]
        p = None if peepholes is None else to_tensor(peepholes)[d]
        steps = x.flip(0) if backward else x
        y, h, c = _steps(node, steps, w[d], r[d], b, h, c, p, d)
        outputs.append(y.flip(0) if backward else y)
        states.append(h)
        cells.append(c)
    y, h = torch.stack(outputs, 1), torch.stack(states)
    c = None if cells[0] is None else torch.stack(cells)
    if node.get("layout"):
        y, h = y.permute(2, 0, 1, 3), h.transpose(0, 1)
        c = None if c is None else c.transpose(0, 1)
    return (y, h) if c is None else (y, h, c)


_FUNCTIONS = {"Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Relu": F.relu, "Softsign": F.softsign}


def _steps(
    node: Node,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor | None,
    h: torch.Tensor | None,
    c: torch.Tensor | None,
    p: torch.Tensor | None,
    direction: int,
) -> Any:
    size, kind = node.get("hidden_size") or r.shape[-1], node.operator
    b = torch.zeros(2 * w.shape[0], dtype=x.dtype) if b is None else b
    h = x.new_zeros(x.shape[1], size) if h is None else h
    default = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[kind]
    names = node.get("activations") or default * 2
    per = len(default)
    chosen = names[direction * per : direction * per + per]
    if missing := [name for name in chosen if name not in _FUNCTIONS]:
        raise Unsupported(f"with activation {missing[0]}")
    functions = [_FUNCTIONS[name] for name in chosen]
    clip = node.get("clip")
    bw, br = b[: w.shape[0]], b[w.shape[0] :]
    if kind == "LSTM":
        c = x.new_zeros(x.shape[1], size) if c is None else c
        if p is None and chosen == default and not clip and not node.get("input_forget"):
            # ONNX orders the gates i, o, f, c and PyTorch i, f, c, o.
            order = [0, 2, 3, 1]
            wi, ri, bi, bh = (_reordered(t, order) for t in (w, r, bw, br))
            y, hn, cn = torch._VF.lstm(x, (h[None], c[None]), [wi, ri, bi, bh], True, 1, 0.0, False, False, False)
            return y, hn[0], cn[0]
    if kind == "GRU" and chosen == default and not clip and node.get("linear_before_reset"):
        wi, ri, bi, bh = (_reordered(t, [1, 0, 2]) for t in (w, r, bw, br))
        y, hn = torch._VF.gru(x, h[None], [wi, ri, bi, bh], True, 1, 0.0, False, False, False)
        return y, hn[0], None
    rows = []
    limit = (lambda t: t.clamp(-clip, clip)) if clip else (lambda t: t)
    for step in x:
        if kind == "RNN":
            h = functions[0](limit(F.linear(step, w, bw) + F.linear(h, r, br)))
        elif kind == "GRU":
            from_x, from_h = F.linear(step, w, bw).chunk(3, -1), None
            rz, rr, rh = r.chunk(3)
            bz, brr, bh = br.chunk(3)
            z = functions[0](limit(from_x[0] + F.linear(h, rz, bz)))
            reset = functions[0](limit(from_x[1] + F.linear(h, rr, brr)))
            if node.get("linear_before_reset"):
                from_h = reset * F.linear(h, rh, bh)
            else:
                from_h = F.linear(reset * h, rh, bh)
            new = functions[1](limit(from_x[2] + from_h))
            h = (1 - z) * new + z * h
        else:
            i, o, f, g = (F.linear(step, w, bw) + F.linear(h, r, br)).chunk(4, -1)
            pi, po, pf = (0, 0, 0) if p is None else p.chunk(3)
            i = functions[0](limit(i + pi * c))
            f = 1 - i if node.get("input_forget") else functions[0](limit(f + pf * c))
            c = f * c + i * functions[1](limit(g))
            o = functions[0](limit(o + po * c))
            h = o * functions[2](c)
        rows.append(h)
    return torch.stack(rows), h, c


def _reordered(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    parts = tensor.chunk(len(order))
    return torch.cat([parts[i] for i in order])


def _by_axis(value: torch.Tensor, x: torch.Tensor, axis: int, block: int = 0) -> torch.Tensor:
    if value.ndim == 0 or value.numel() == 1:
        return value.reshape(())
    if block:
        value = value.repeat_interleave(block, axis)
        return value.narrow(axis, 0, x.shape[axis])
    return value.reshape((-1,) + (1,) * (x.ndim - 1 - axis % x.ndim))


RANGES = {
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.uint16: (0, 65535),
    torch.int16: (-32768, 32767),
}


@operator("QuantizeLinear")
def _quantize(node: Node, x: torch.Tensor, scale: Value, zero: Value | None = None) -> torch.Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    kind = DTYPES[node.get("output_dtype") or 2]
    zero = torch.zeros((), dtype=kind) if zero is None else to_tensor(zero)
    if zero.dtype not in RANGES:
        raise Unsupported(f"to {zero.dtype}")
    low, high = RANGES[zero.dtype]
    scale = _by_axis(to_tensor(scale), x, axis, block).to(x.dtype)
    shift = _by_axis(zero.float() if zero.dtype != torch.uint16 else zero.int().float(), x, axis, block)
    y = (torch.round(x / scale).float() + shift).clamp(low, high)
    return y.to(torch.int32).to(zero.dtype)


@operator("DequantizeLinear")
def _dequantize(node: Node, x: torch.Tensor, scale: Value, zero: Value | None = None) -> torch.Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    scale = to_tensor(scale)
    if x.dtype not in (*RANGES, torch.int32):
        raise Unsupported(f"from {x.dtype}")
    shift = 0 if zero is None else _by_axis(to_tensor(zero).int(), x, axis, block)
    return (x.int() - shift).to(scale.dtype) * _by_axis(scale, x, axis, block)


@operator("QLinearMatMul")
def _integer_matmul(node: Node, *values: Value) -> torch.Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = values
    last = Node(node.operator, node.name, (), (), node.opset, {"axis": -1})
    rows = Node(node.operator, node.name, (), (), node.opset, {"axis": -2})
    x = _dequantize(rows, to_tensor(a), a_scale, a_zero)
    return _quantize(last, x @ _dequantize(last, to_tensor(b), b_scale, b_zero), scale, zero)


@operator("QLinearConv")
def _integer_conv(node: Node, *values: Value) -> torch.Tensor:
    x, x_scale, x_zero, w, w_scale, w_zero, scale, zero, bias = (*values, None)[:9]
    first = Node(node.operator, node.name, (), (), node.opset, {"axis": 0})
    weight = _dequantize(first, to_tensor(w), w_scale, w_zero)
    x = _dequantize(node, to_tensor(x), x_scale, x_zero)
    if bias is not None:
        bias = to_tensor(bias) * to_tensor(x_scale) * to_tensor(w_scale)
    return _quantize(node, _conv(node, x, weight, bias), scale, zero)


@operator("ConvInteger", "MatMulInteger")
def _integers(node: Node, x: Value, w: Value, *zeros: Value | None) -> torch.Tensor:
    x_zero, w_zero = (*(None if z is None else to_tensor(z) for z in zeros), None, None)[:2]
    x, w = to_tensor(x).double(), to_tensor(w).double()
    is_conv = node.operator == "ConvInteger"
    x = x if x_zero is None else x - _by_axis(x_zero.double(), x, 1 if is_conv else -2)
    w = w if w_zero is None else w - _by_axis(w_zero.double(), w, 0 if is_conv else -1)
    return (_conv(node, x, w) if is_conv else x @ w).to(torch.int32)


@operator("DFT")
def _dft(node: Node, x: torch.Tensor, length: Value | None = None, axis: Value | None = None) -> Any:
    n = None if length is None else int(to_number(length))
    dim = node.get("axis", 1) if axis is None else to_number(axis)
    dim = dim if dim >= 0 else dim + x.ndim
    is_real = x.shape[-1] == 1
    signal = x[..., 0] if is_real else torch.view_as_complex(x.contiguous())
    one_sided = bool(node.get("onesided"))
    if not node.get("inverse"):
        transform = torch.fft.rfft if one_sided else torch.fft.fft
        return torch.view_as_real(transform(signal, n, dim))
    if one_sided:
        return torch.fft.irfft(signal, n, dim).unsqueeze(-1)
    return torch.view_as_real(torch.fft.ifft(signal, n, dim))


@operator("STFT")
def _stft(
    node: Node,
    x: torch.Tensor,
    step: Value,
    window: Value | None = None,
    length: Value | None = None,
) -> torch.Tensor:
    if x.ndim == 3 and x.shape[-1] == 2:
        raise Unsupported("of complex signals")
    signal = x.squeeze(-1) if x.ndim == 3 else x
    given = None if window is None else to_tensor(window)
    size = given.shape[0] if length is None else int(to_number(length))
    frames = signal.unfold(-1, size, int(to_number(step)))
    frames = frames if given is None else frames * given
    transform = torch.fft.rfft if node.get("onesided", 1) else torch.fft.fft
    return torch.view_as_real(transform(frames, dim=-1))
