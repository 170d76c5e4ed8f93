"""ONNX operators of shapes, and those that select, join and move elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.graph.from_onnx.elementwise import DTYPES
from compress.graph.from_onnx.layers import both_sides
from compress.graph.from_onnx.registry import OPERATORS, Node, Unsupported, operator
from compress.graph.from_onnx.shape_tensor import (
    ShapeTensor,
    Value,
    from_constant,
    to_number,
    to_sizes,
    to_tensor,
    vector,
)

FAR = 10**9  # from which on a slice's end means the end of the axis; tf2onnx writes this number


@operator("Constant")
def _constant(node: Node) -> Value:
    ((kind, value),) = node.attributes.items()
    dtype = torch.float32 if "float" in kind else torch.int64
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
    held = from_constant(tensor)
    return tensor if held is None else held


@operator("Shape")
def _shape(node: Node, x: Value) -> ShapeTensor:
    sizes = (len(x.values),) * x.ndim if isinstance(x, ShapeTensor) else tuple(x.shape)
    return vector(sizes[node.get("start", 0) : node.get("end")])


@operator("Reshape")
def _reshape(node: Node, x: Value, shape: Value | None = None) -> Value:
    sizes = node.get("shape") if shape is None else to_sizes(shape)
    if isinstance(x, ShapeTensor) and len(sizes) < 2:
        return ShapeTensor(x.values, bool(sizes), x.dtype)
    x = to_tensor(x)
    if not node.get("allowzero"):
        sizes = [
            x.shape[axis] if isinstance(size, int) and size == 0 else size
            for axis, size in enumerate(sizes)
        ]
    return x.reshape(sizes)


@operator("Flatten")
def _flatten(node: Node, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    if axis == 1:
        return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
    return x.unsqueeze(0).flatten()[None] if axis == 0 else x.flatten(axis).flatten(0, axis - 1)


def _given_axes(node: Node, axes: Value | None) -> list[int] | None:
    return node.get("axes") if axes is None else to_sizes(axes)


@operator("Squeeze")
def _squeeze(node: Node, x: Value, axes: Value | None = None) -> Value:
    given = _given_axes(node, axes)
    if isinstance(x, ShapeTensor):
        return ShapeTensor(x.values, False, x.dtype) if len(x.values) == 1 else x
    if given is None:
        given = [axis for axis, size in enumerate(x.shape) if size == 1]
    return x.squeeze(tuple(given))


@operator("Unsqueeze")
def _unsqueeze(node: Node, x: Value, axes: Value | None = None) -> Value:
    given = _given_axes(node, axes) or []
    if isinstance(x, ShapeTensor) and not x.is_vector and len(given) == 1:
        return ShapeTensor(x.values, True, x.dtype)
    x = to_tensor(x)
    ndim = x.ndim + len(given)
    for axis in sorted(axis % ndim for axis in given):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def _transpose(node: Node, x: Value) -> Value:
    if isinstance(x, ShapeTensor):
        return x
    return x.permute(node.get("perm") or tuple(reversed(range(x.ndim))))


@operator("Concat")
def _concat(node: Node, *parts: Value) -> Value:
    if all(isinstance(part, ShapeTensor) for part in parts):
        return vector([v for part in parts for v in part.values], parts[0].dtype)
    return torch.cat([to_tensor(part) for part in parts], node.get("axis", 1))


@operator("Split")
def _split(node: Node, x: Value, split: Value | None = None) -> tuple[Value, ...]:
    sizes = node.get("split") if split is None else to_sizes(split)
    axis = node.get("axis", 0)
    count = node.get("num_outputs") or len(node.outputs)
    if isinstance(x, ShapeTensor):
        sizes = sizes or [-(-len(x.values) // count)] * count
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = (x.values[i : i + n] for i, n in zip(starts, sizes, strict=True))
        return tuple(vector(part, x.dtype) for part in parts)
    if sizes:
        return x.split(sizes, axis)
    return x.split(-(-x.shape[axis] // count), axis)


@operator("Slice")
def _slice(
    node: Node,
    x: Value,
    starts: Value | None = None,
    ends: Value | None = None,
    axes: Value | None = None,
    steps: Value | None = None,
) -> Value:
    begin = node.get("starts") if starts is None else to_sizes(starts)
    end = node.get("ends") if ends is None else to_sizes(ends)
    dims = _given_axes(node, axes) or list(range(len(begin)))
    by = [1] * len(begin) if steps is None else to_sizes(steps)
    if isinstance(x, ShapeTensor):
        return vector(x.values[_range(begin[0], end[0], by[0])], x.dtype)
    for start, stop, axis, step in zip(begin, end, dims, by, strict=True):
        if step < 0:  # as torch slices forwards alone
            size = x.shape[axis]
            first = min(start if start >= 0 else start + size, size - 1)
            last = -1 if stop < -size else stop if stop >= 0 else stop + size
            index = torch.arange(first, last, step, device=x.device)
            x = x.index_select(axis, index)
            continue
        window = _range(start, stop, step)
        x = x[(slice(None),) * (axis % x.ndim) + (window,)]
    return x


def _range(start: Any, stop: Any, step: int) -> slice:
    if step < 0:
        return slice(None if start >= FAR else start, None if stop <= -FAR else stop, step)
    return slice(start, None if isinstance(stop, int) and stop >= FAR else stop, step)


@operator("Gather")
def _gather(node: Node, x: Value, indices: Value) -> Value:
    axis = node.get("axis", 0)
    if isinstance(x, ShapeTensor) and isinstance(indices, ShapeTensor):
        picked = [x.values[int(i)] for i in indices.values]
        return ShapeTensor(tuple(picked), indices.is_vector, x.dtype)
    x = to_tensor(x)
    if isinstance(indices, ShapeTensor) and not indices.is_vector:
        return x.select(axis, indices.values[0])
    index = _positive(to_tensor(indices, x.device), x.shape[axis])
    if axis == 0 and x.ndim == 2 and x.is_floating_point():
        return F.embedding(index, x)
    picked = x.index_select(axis, index.reshape(-1))
    axis = axis % x.ndim
    return picked.reshape(*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])


def _positive(indices: Tensor, size: int) -> Tensor:
    indices = indices.long()
    return torch.where(indices < 0, indices + size, indices)


@operator("GatherND")
def _gather_nd(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    batch, index = node.get("batch_dims", 0), indices.long()
    lead = [
        torch.arange(x.shape[axis]).reshape((-1,) + (1,) * (index.ndim - 2 - axis))
        for axis in range(batch)
    ]
    return x[(*lead, *(index[..., i] for i in range(index.shape[-1])))]


REDUCES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterElements", "Scatter")
def _scatter(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis, how = node.get("axis", 0), node.get("reduction", "none")
    index = _positive(indices, x.shape[axis])
    if how == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, REDUCES[how])


@operator("ScatterND")
def _scatter_nd(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    index, source = indices.long(), updates
    depth = index.shape[-1]
    how = node.get("reduction", "none")
    where = tuple(_positive(index[..., i], x.shape[i]) for i in range(depth))
    if how == "none":
        return x.index_put(where, source)
    # Places of the first axes as one, so that entries that occur twice are reduced.
    flat = x.reshape(-1, *x.shape[depth:]) if depth else x
    place = torch.zeros_like(where[0])
    for axis, part in enumerate(where):
        place = place * x.shape[axis] + part
    rows = place.reshape(-1)
    source = source.reshape(rows.shape[0], *x.shape[depth:])
    rows = rows.reshape(-1, *(1,) * (source.ndim - 1)).expand_as(source)
    return flat.scatter_reduce(0, rows, source, REDUCES[how]).reshape(x.shape)


@operator("Expand")
def _expand(node: Node, x: Value, shape: Value) -> Value:
    sizes = to_sizes(shape)
    is_one = isinstance(x, ShapeTensor) and len(x.values) == 1
    if is_one and len(sizes) == 1 and isinstance(sizes[0], int):
        return vector(x.values * sizes[0], x.dtype)
    x = to_tensor(x)
    sizes = [1] * (x.ndim - len(sizes)) + sizes
    own = (1,) * (len(sizes) - x.ndim) + tuple(x.shape)
    wide = [o if isinstance(n, int) and n == 1 else n for o, n in zip(own, sizes, strict=True)]
    return x.expand(wide)


@operator("ConstantOfShape")
def _constant_of_shape(node: Node, shape: Value) -> Value:
    fill, sizes = node.get("value", torch.zeros(1)), to_sizes(shape)
    if len(sizes) == 1 and isinstance(sizes[0], int) and not fill.is_floating_point():
        return vector([fill.item()] * sizes[0], fill.dtype)
    return torch.full(sizes, fill.item(), dtype=fill.dtype)


@operator("Range")
def _range_of(node: Node, start: Value, limit: Value, delta: Value) -> Value:
    first, last, step = (to_number(v) for v in (start, limit, delta))
    if all(isinstance(v, int) for v in (first, last, step)):
        return vector(range(first, last, step), start.dtype)
    return torch.arange(first, last, step, dtype=start.dtype)


@operator("EyeLike")
def _eye_like(node: Node, x: Tensor) -> Tensor:
    dtype = DTYPES[node.get("dtype")] if node.get("dtype") else x.dtype
    k, (rows, columns) = node.get("k", 0), x.shape
    places = torch.arange(columns)[None] - torch.arange(rows)[:, None]
    return (places == k).to(dtype)


@operator("OneHot")
def _one_hot(node: Node, indices: Tensor, depth: Value, values: Tensor) -> Tensor:
    count = int(to_number(depth))
    places = _positive(indices, count)
    off, on = values
    hot = places.unsqueeze(-1) == torch.arange(count)
    axis = node.get("axis", -1)
    return torch.where(hot, on, off).movedim(-1, axis)


@operator("Compress")
def _compress(node: Node, x: Tensor, condition: Tensor) -> Tensor:
    axis = node.get("axis")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    kept = condition.nonzero().squeeze(1)
    return x.index_select(axis, kept)


@operator("Pad")
def _pad(
    node: Node,
    x: Tensor,
    pads: Value | None = None,
    fill: Value | None = None,
    axes: Value | None = None,
) -> Tensor:
    sizes = (node.get("pads") or node.get("paddings")) if pads is None else to_sizes(pads)
    number = node.get("value", 0.0) if fill is None else to_number(fill)
    dims = list(range(x.ndim)) if axes is None else [a % x.ndim for a in to_sizes(axes)]
    before, after = [0] * x.ndim, [0] * x.ndim
    for i, axis in enumerate(dims):
        before[axis], after[axis] = sizes[i], sizes[len(dims) + i]
    mode = node.get("mode", "constant")
    if mode == "constant":
        return F.pad(x, both_sides(before, after), value=number)
    padded = [axis for axis in range(x.ndim) if before[axis] or after[axis]]
    count = x.ndim - min(padded, default=0)
    sizes = [(x.shape[axis], max(before[axis], after[axis])) for axis in padded]
    # In the forms that torch has it is one operator in every runtime.
    fits = x.ndim - count in (1, 2) and all(isinstance(n, int) and n > most for n, most in sizes)
    if count < 4 and fits and mode in ("reflect", "edge"):
        kind = {"edge": "replicate"}.get(mode, mode)
        return F.pad(x, both_sides(before[-count:], after[-count:]), kind)
    for axis in padded:
        size = x.shape[axis]
        place = _OUTSIDE[mode](torch.arange(-before[axis], size + after[axis]), size)
        x = x.index_select(axis, place)
    return x


_OUTSIDE = {
    "edge": lambda place, size: place.clamp(0, size - 1),
    "wrap": lambda place, size: place % size,
    "reflect": lambda place, size: (size - 1) - ((place % (2 * size - 2)) - (size - 1)).abs(),
}


@operator("DepthToSpace")
def _depth_to_space(node: Node, x: Tensor) -> Tensor:
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    n, c, h, w = x.shape
    x = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, c // block**2, h * block, w * block)


@operator("SpaceToDepth")
def _space_to_depth(node: Node, x: Tensor) -> Tensor:
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_unshuffle(x, block)
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return x.reshape(n, c * block**2, h // block, w // block)


@operator("ReverseSequence")
def _reverse_sequence(node: Node, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = node.get("time_axis", 0), node.get("batch_axis", 1)
    x = x.movedim((batch, time), (0, 1))
    steps = torch.arange(x.shape[1])[None]
    length = lengths[:, None]
    place = torch.where(steps < length, length - 1 - steps, steps)
    place = place.reshape(place.shape + (1,) * (x.ndim - 2)).expand_as(x)
    return x.gather(1, place).movedim((0, 1), (batch, time))


@operator("Unique")
def _unique(node: Node, x: Tensor) -> tuple[Tensor, ...]:
    axis = node.get("axis")
    if not node.get("sorted", 1):
        raise Unsupported("unsorted")
    values, inverse, counts = torch.unique(x, True, True, True, axis)
    inverse = inverse.reshape(-1)
    places = torch.arange(inverse.numel())
    first = torch.full((counts.numel(),), inverse.numel()).scatter_reduce(
        0, inverse, places, "amin"
    )
    return values, first, inverse, counts


@operator("SplitToSequence")
def _split_to_sequence(node: Node, x: Tensor, split: Value | None = None) -> list[Value]:
    axis = node.get("axis", 0)
    if split is None:
        parts = x.split(1, axis)
        return list(parts) if node.get("keepdims", 1) else [p.squeeze(axis) for p in parts]
    scalar = isinstance(split, ShapeTensor) and not split.is_vector
    return list(x.split(to_number(split) if scalar else to_sizes(split), axis))


def _inserted(values: list[Value], value: Value, place: Value | None) -> list[Value]:
    index = len(values) if place is None else to_number(place)
    return [*values[:index], value, *values[index:]]


def _erased(values: list[Value], place: Value | None) -> list[Value]:
    index = (-1 if place is None else to_number(place)) % len(values)
    return values[:index] + values[index + 1 :]


def _joined(tensors: list[Tensor], axis: int, is_new: bool) -> Tensor:
    return torch.stack(tensors, axis) if is_new else torch.cat(tensors, axis)


OPERATORS |= {
    "Size": lambda node, x: ShapeTensor((to_tensor(x).numel(),), False, torch.int64),
    "Tile": lambda node, x, repeats: to_tensor(x).repeat(to_sizes(repeats)),
    "NonZero": lambda node, x: to_tensor(x).nonzero().t(),
    "GatherElements": lambda node, x, indices: torch.gather(
        x, node.get("axis", 0), _positive(to_tensor(indices), x.shape[node.get("axis", 0)])
    ),
    "SequenceConstruct": lambda node, *values: list(values),
    "SequenceEmpty": lambda node: [],
    "SequenceAt": lambda node, sequence, place: sequence[to_number(place)],
    "SequenceLength": lambda node, sequence: ShapeTensor((len(sequence),), False, torch.int64),
    "SequenceInsert": lambda node, sequence, value, place=None: _inserted(sequence, value, place),
    "SequenceErase": lambda node, sequence, place=None: _erased(sequence, place),
    "ConcatFromSequence": lambda node, sequence: _joined(
        [to_tensor(v) for v in sequence], node.get("axis"), bool(node.get("new_axis"))
    ),
}
