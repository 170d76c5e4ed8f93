"""How many values of each quantized tensor are at an end of its range, computed in the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from compress.export.onnx.cascade_graph import GraphBuilder
from compress.export.onnx.graph import stored
from compress.export.onnx.proto_io import read, write


def write_range_ends(file: Path, counting: Path) -> tuple[str, ...]:
    """Write a model that gives shares of values, in place of a model's outputs, to another file.

    For each activation that is rounded to 8 or 16 bits, with a fixed range, they are the shares of
    the values at its smallest and at its largest number. Return their names; without any, nothing
    is written. Zeros behind a ReLU are at the smallest, rightly.
    """
    model = read(file, weights=True)
    graph = model.graph
    build, names, shares = GraphBuilder(graph), list[str](), list[ir.Value]()
    for node in graph:
        if node.op_type != "QuantizeLinear" or node.domain:
            continue
        x, scale, zero_point = (*node.inputs, None)[:3]
        grid = stored(zero_point)
        dtype = grid.dtype if grid is not None else ir.DataType.UINT8
        if x is None or stored(x) is not None or stored(scale) is None or not dtype.is_integer():
            continue
        limits = np.iinfo(dtype.numpy())
        (numbers,) = build.add("Cast", [node.outputs[0]], to=ir.DataType.INT32)
        for end, limit in (("smallest", limits.min), ("largest", limits.max)):
            reached = build.add("Equal", [numbers, build.constant(limit, np.int32)])
            ones = build.add("Cast", reached, to=ir.DataType.FLOAT)
            share = build.add("ReduceMean", ones, keepdims=0)
            shares += build.add("Reshape", [*share, build.constant([1])])
            names.append(f"{x.name}, {end}")
    if names:
        (together,) = build.add("Concat", shares, axis=0)
        graph.extend(build.take())
        graph.outputs[:] = [together]
        together.dtype, together.shape = ir.DataType.FLOAT, ir.Shape([len(names)])
        write(model, counting)
    return tuple(names)
