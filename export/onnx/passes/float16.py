"""Half precision in ONNX: refuse what onnxruntime cannot run, avoid what crashes it."""

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


def has_weights_of(program: ExportedProgram, dtype: torch.dtype) -> bool:
    """Whether a program has weights of a type."""
    return any(tensor.dtype is dtype for tensor in program.state_dict.values())


def refuse_bfloat16(program: ExportedProgram) -> None:
    """Refuse weights that onnxruntime has no kernels for.

    Raises:
        StageFailed: weights are bfloat16.
    """
    if has_weights_of(program, torch.bfloat16):
        raise StageFailed(NO_BFLOAT16)


def separate_transposes_(model: onnx.ModelProto) -> None:
    """Keep onnxruntime from fusing transposed batches into float16 products, in place.

    onnxruntime 1.31 ends the process (SIGSEGV) while it loads a float16 MatMul that reads a
    Transpose of leading axes. A Reshape to the same shape between the two prevents it.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    for product in [node for node in graph.node if node.op_type == "MatMul"]:
        for place, name in enumerate(product.input):
            rank = _transposed_rank(producers, name)
            if rank:
                shape = np.array([0] * (rank - 1) + [-1], np.int64)  # 0: the axis as it is
                reshaped = f"{product.output[0]}_{place}"
                graph.initializer.append(numpy_helper.from_array(shape, f"{reshaped}_shape"))
                reshape = helper.make_node("Reshape", [name, f"{reshaped}_shape"], [reshaped])
                graph.node.insert(list(graph.node).index(product), reshape)
                product.input[place] = reshaped


def _transposed_rank(producers: dict[str, onnx.NodeProto], name: str) -> int:
    """Return the rank of a Transpose's result whose last axis stays the last; 0 for others."""
    producer = producers.get(name)
    while producer is not None and producer.op_type == "Cast":
        producer = producers.get(producer.input[0])
    if producer is None or producer.op_type != "Transpose":
        return 0
    order = next((list(a.ints) for a in producer.attribute if a.name == "perm"), [0])
    return len(order) if order[-1] == len(order) - 1 else 0
