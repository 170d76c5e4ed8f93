"""RMS norms in the form that onnxruntime computes by one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def use_fused_rms_norms_(model: onnx.ModelProto) -> None:
    """Divide by a square root instead of multiplying with its reciprocal, in place.

    The exporter writes `rsqrt` as Reciprocal of Sqrt. onnxruntime 1.32 fuses a norm to
    SimplifiedLayerNormalization only where it divides; apart, a norm is seven kernels.
    """
    graph = model.graph
    made_by = {name: node for node in graph.node for name in node.output}
    readers: dict[str, int] = {}
    for node in graph.node:
        for name in node.input:
            readers[name] = readers.get(name, 0) + 1
    for node in graph.node:
        if node.op_type != "Mul":
            continue
        for place, name in enumerate(node.input):
            inverse = made_by.get(name)
            if inverse is None or inverse.op_type != "Reciprocal" or readers[name] != 1:
                continue
            root = made_by.get(inverse.input[0])
            if root is not None and root.op_type == "Sqrt":
                other = node.input[1 - place]
                node.op_type, node.input[:] = "Div", [other, root.output[0]]
                graph.node.remove(inverse)
                break
