"""RMS norms in the form that onnxruntime computes by one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.export.onnx.graph import producer

if TYPE_CHECKING:
    import onnx_ir as ir


def use_fused_rms_norms_(model: ir.Model) -> None:
    """Divide by a square root instead of multiplying with its reciprocal, in place.

    The exporter writes `rsqrt` as Reciprocal of Sqrt. onnxruntime 1.32 fuses a norm to
    SimplifiedLayerNormalization only where it divides; apart, a norm is seven kernels.
    """
    for node in model.graph:
        for place, value in enumerate(node.inputs if node.op_type == "Mul" else ()):
            inverse = producer(value, "Reciprocal")
            if inverse is None or len(inverse.outputs[0].uses()) != 1:
                continue
            if producer(inverse.inputs[0], "Sqrt") is not None:
                node.op_type, other = "Div", node.inputs[1 - place]
                node.replace_input_with(0, other)
                node.replace_input_with(1, inverse.inputs[0])
                model.graph.remove(inverse, safe=True)
                break
