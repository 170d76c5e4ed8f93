"""ONNX operators with graphs of their own: branches and loops, which are taken and unrolled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.graph.from_onnx.registry import Node, Unsupported, operator
from compress.graph.from_onnx.shape_tensor import ShapeTensor, Value, to_tensor


def _known(value: Value | None, what: str) -> Any:
    if value is None or isinstance(value, ShapeTensor):
        return None if value is None else value.values[0]
    if torch.compiler.is_compiling():
        raise Unsupported(f"whose {what} depends on the data")
    return value.reshape(-1)[0].item()


@operator("If")
def _if(node: Node, condition: Value) -> Any:
    branch = "then_branch" if _known(condition, "condition") else "else_branch"
    return tuple(node.graphs[branch]())


@operator("Loop")
def _loop(node: Node, count: Value | None, go_on: Value | None, *initial: Any) -> Any:
    limit, active = _known(count, "number of steps"), _known(go_on, "condition")
    active, carried = True if active is None else active, list(initial)
    rows: list[list[Tensor]] = []
    step = 0
    outputs = len(node.outputs) - len(carried)
    while active and (limit is None or step < limit):
        number = ShapeTensor((step,), False, torch.int64)
        condition = ShapeTensor((True,), False, torch.bool)
        again, *results = node.graphs["body"](number, condition, *carried)
        carried, scanned = results[: len(carried)], results[len(carried) :]
        rows.append([to_tensor(value) for value in scanned])
        step, active = step + 1, _known(again, "condition")
    if outputs and not rows:
        raise Unsupported("without a step")
    return (*carried, *(torch.stack(row) for row in zip(*rows, strict=True)))


@operator("Scan")
def _scan(node: Node, *values: Any) -> Any:
    if node.opset < 9:
        raise Unsupported("of opset 8")
    count = node.get("num_scan_inputs")
    states, scanned = list(values[: len(values) - count]), values[len(values) - count :]
    ways = node.get("scan_input_directions") or [0] * count
    axes = node.get("scan_input_axes") or [0] * count
    columns = [to_tensor(x).unbind(axis) for x, axis in zip(scanned, axes, strict=True)]
    columns = [c[::-1] if way else c for c, way in zip(columns, ways, strict=True)]
    rows = []
    for parts in zip(*columns, strict=True):
        results = node.graphs["body"](*states, *parts)
        states, outputs = results[: len(states)], results[len(states) :]
        rows.append([to_tensor(value) for value in outputs])
    outputs = [list(row) for row in zip(*rows, strict=True)]
    ways = node.get("scan_output_directions") or [0] * len(outputs)
    axes = node.get("scan_output_axes") or [0] * len(outputs)
    stacked = (
        torch.stack(row[::-1] if way else row, axis)
        for row, way, axis in zip(outputs, ways, axes, strict=True)
    )
    return (*states, *stacked)
