"""ONNX operators that resize and sample images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.graph.from_onnx.registry import Node, operator
from compress.graph.from_onnx.shape_tensor import Value, to_sizes


@operator("Upsample", "Resize")
def _resize(node: Node, x: Tensor, *rest: Value | None) -> Tensor:
    if node.operator == "Upsample":
        scales = node.get("scales") if not rest else to_sizes(rest[0])
        return _interpolate(node, x, scales, None, "asymmetric", "floor")
    roi, scales, sizes = (*rest, None, None, None)[:3]
    if node.opset < 11:
        return _interpolate(node, x, to_sizes(roi), None, "asymmetric", "floor")
    coordinates = node.get("coordinate_transformation_mode", "half_pixel")
    nearest = node.get("nearest_mode", "round_prefer_floor")
    roi, scales, sizes = (v if v is None else to_sizes(v) or None for v in (roi, scales, sizes))
    return _interpolate(node, x, scales, sizes, coordinates, nearest, roi)


def _interpolate(
    node: Node,
    x: Tensor,
    scales: Any,
    sizes: list[Any] | None,
    coordinates: str,
    nearest: str,
    window: list[float] | None = None,
) -> Tensor:
    mode, n = node.get("mode", "nearest"), x.ndim
    axes = [axis % n for axis in node.get("axes", range(n))]
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if sizes is not None and policy != "stretch":
        choose = min if policy == "not_larger" else max
        ratio = choose(size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True))
        sizes = [math.floor(x.shape[axis] * ratio + 0.5) for axis in axes]
        scales = [ratio] * len(axes)
    elif sizes is not None:
        scales = [size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    else:
        # Whole scales as integers keep symbolic sizes simple.
        scales = [int(s) if isinstance(s, float) and s.is_integer() else s for s in scales]
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
            kind, aligned = known
            by_axis = {a: r for a, _, r, _ in moved}
            if all(isinstance(r, int) for r in by_axis.values()):
                by = [by_axis.get(axis, 1) for axis in range(2, n)]
                return F.interpolate(x, scale_factor=by, mode=kind, align_corners=aligned)
            target = {a: s for a, s, _, _ in moved}
            # Other sizes are rounded, and ONNX goes on with the scale before that.
            if (len(node.inputs) > 3 and node.inputs[3]) or all(
                isinstance(s, int) and abs(x.shape[a] * r - s) < 1e-6 for a, s, r, _ in moved
            ):
                shape = [target.get(axis, x.shape[axis]) for axis in range(2, n)]
                return F.interpolate(x, shape, mode=kind, align_corners=aligned)
    for axis, size, scale, place in moved:
        part = None if window is None else (window[place], window[len(axes) + place])
        x = _resample(node, x, axis, size, scale, coordinates, nearest, part)
    return x


def _floor(value: Any) -> Any:
    return math.floor(value + 1e-9) if isinstance(value, int | float) else torch.sym_int(value)


def _torch_mode(
    mode: str, coordinates: str, nearest: str, axes: int, node: Node, sizes: list[Any]
) -> Any:
    """Return mode and `align_corners` of `F.interpolate` that compute the same; else None."""
    if mode == "nearest" and coordinates == "asymmetric" and nearest == "floor":
        return "nearest", None
    if coordinates == "pytorch_half_pixel" and any(isinstance(s, int) and s == 1 for s in sizes):
        return None  # where this takes the first element, and torch the middle
    corners = {"align_corners": True, "half_pixel": False, "pytorch_half_pixel": False}
    aligned = corners.get(coordinates)
    if mode == "linear" and aligned is not None:
        return ("linear", "bilinear", "trilinear")[axes - 1], aligned
    is_torch_cubic = node.get("cubic_coeff_a", -0.75) == -0.75 and not node.get("exclude_outside")
    if mode == "cubic" and aligned is not None and axes == 2 and is_torch_cubic:
        return "bicubic", aligned
    return None


def _resample(
    node: Node,
    x: Tensor,
    axis: int,
    size: Any,
    scale: Any,
    coordinates: str,
    nearest: str,
    window: tuple[float, float] | None,
) -> Tensor:
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
        steps = math.ceil(reach) + 1
        low, high = int(min(at.min().item(), 0)) - steps, int(max(at.max().item(), length)) + steps
        wide = torch.arange(low, high + 1, dtype=torch.float64)
        weights = _kernel(mode, at[:, None] - wide[None], stretch, node)
        target = wide.clamp(0, length - 1).long()
        weights = torch.zeros(len(out), length, dtype=torch.float64).index_add(1, target, weights)
    weights = weights / weights.sum(1, keepdim=True)
    y = torch.tensordot(x.movedim(axis, -1), weights.to(x.dtype), dims=([-1], [1]))
    return _extrapolated(node, y.movedim(-1, axis), axis, at, length, coordinates)


def _extrapolated(
    node: Node, y: Tensor, axis: int, at: Tensor, length: int, coordinates: str
) -> Tensor:
    if coordinates != "tf_crop_and_resize":
        return y
    outside = ((at < 0) | (at > length - 1)).reshape((-1,) + (1,) * (y.ndim - 1 - axis))
    return torch.where(outside, node.get("extrapolation_value", 0.0), y)


def _kernel(mode: str, distance: Tensor, stretch: float, node: Node) -> Tensor:
    distance = (distance * stretch).abs()
    if mode == "linear":
        return (1 - distance).clamp(min=0)
    a = node.get("cubic_coeff_a", -0.75)
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


@operator("GridSample")
def _grid_sample(node: Node, x: Tensor, grid: Tensor) -> Tensor:
    mode, outside = node.get("mode", "linear"), node.get("padding_mode", "zeros")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, mode, outside, bool(node.get("align_corners")))
