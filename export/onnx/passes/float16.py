"""Half precision in ONNX: what onnxruntime cannot run is refused, what it stumbles over mended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from compress.common.errors import StageFailed
from export.common.targets import NO_BFLOAT16

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def holds(program: ExportedProgram, dtype: torch.dtype) -> bool:
    """Whether a program has weights of a type."""
    return any(tensor.dtype is dtype for tensor in program.state_dict.values())


def refuse_bfloat16(program: ExportedProgram) -> None:
    """Refuse what onnxruntime has no kernels for.

    Raises:
        StageFailed: weights are bfloat16.
    """
    if holds(program, torch.bfloat16):
        raise StageFailed(NO_BFLOAT16)


def part_transposes_(model: onnx.ModelProto) -> None:
    """Keep onnxruntime from fusing transposed batches into float16 products, in place.

    onnxruntime 1.31 ends the process (SIGSEGV) while it loads a float16 MatMul that reads a
    Transpose of leading axes. A Reshape to the same shape between the two prevents it.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    for product in [node for node in graph.node if node.op_type == "MatMul"]:
        for place, name in enumerate(product.input):
            moved = _transposed_rank(makers, name)
            if moved:
                shape = np.array([0] * (moved - 1) + [-1], np.int64)
                made = f"{product.output[0]}_{place}"
                graph.initializer.append(numpy_helper.from_array(shape, f"{made}_shape"))
                reshape = helper.make_node("Reshape", [name, f"{made}_shape"], [made])
                graph.node.insert(list(graph.node).index(product), reshape)
                product.input[place] = made


def _transposed_rank(makers: dict[str, onnx.NodeProto], name: str) -> int:
    """Return the rank of what a Transpose made whose last axis stays the last; 0 elsewhere."""
    maker = makers.get(name)
    while maker is not None and maker.op_type == "Cast":
        maker = makers.get(maker.input[0])
    if maker is None or maker.op_type != "Transpose":
        return 0
    order = next((list(a.ints) for a in maker.attribute if a.name == "perm"), [0])
    return len(order) if order[-1] == len(order) - 1 else 0
