"""From torch's exporter to protobuf, with no weight in memory twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnxscript import ir

if TYPE_CHECKING:
    import onnx
    from torch.onnx import ONNXProgram


def proto_of(exported: ONNXProgram, *, emptied: bool) -> onnx.ModelProto:
    """Return an exported program as protobuf.

    Stack traces are left out: they outweigh the weights of a small model.

    Args:
        exported: what torch's exporter returned; its model keeps no weights.
        emptied: whether the tensors of its program go as well, each as soon as it is copied.
            Letting go of the program does not do it: onnxscript (0.7) holds the last graphs that
            it rewrote.
    """
    graph = exported.model.graph
    for node in graph.all_nodes():
        node.metadata_props.clear()
    tensors: dict[str, Any] = {n: value.const_value for n, value in graph.initializers.items()}
    for value in graph.initializers.values():
        value.const_value = ir.tensor(np.empty(0, np.float32))
    model: onnx.ModelProto = exported.model_proto
    raw = {name: getattr(tensor, "raw", None) for name, tensor in tensors.items()}
    # A tensor may have several names, and is needed up to the last one.
    last = {id(tensor): name for name, tensor in raw.items()}
    program = exported.exported_program
    if emptied and program is not None:
        _empty_(*(t for t in program.state_dict.values() if id(t) not in last))
    for proto in model.graph.initializer:
        name = proto.name
        tensor, held = tensors.pop(name), raw.pop(name)
        proto.dims[:] = tensor.shape.numpy()
        proto.data_type = tensor.dtype.value
        numbers = tensor.tobytes()
        if emptied and isinstance(held, torch.Tensor) and last[id(held)] == name:
            _empty_(held)
        del tensor, held
        proto.raw_data = numbers
    return model


def _empty_(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.new_empty(0)
