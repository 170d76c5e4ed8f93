"""Means over all spatial axes become poolings, which ONNX Runtime computes in blocked layouts."""

import onnx
import onnx_ir as ir
import pytest

from compress.export.onnx.passes.float_layers import pool_means_


@pytest.mark.parametrize(
    ("axes", "keepdims", "operator", "x"),
    [
        ([2, 3], 1, "GlobalAveragePool", "float[batch, 4, height, width]"),
        ([-1, -2], 1, "GlobalAveragePool", "float[batch, 4, height, width]"),
        ([2, 3], 0, "ReduceMean", "float[batch, 4, height, width]"),
        ([3], 1, "ReduceMean", "float[batch, 4, height, width]"),
        ([1, 2, 3], 1, "ReduceMean", "float[batch, 4, height, width]"),
        ([2, 3], 1, "ReduceMean", "double[batch, 4, height, width]"),  # onnxruntime pools none
        ([-1], 1, "ReduceMean", "float[batch, tokens, 8]"),  # of a norm, which it fuses
    ],
)
def test_only_means_over_all_spatial_axes_are_pooled(axes, keepdims, operator, x) -> None:
    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    means ({x} x) => (float[n] y)
    <int64[{len(axes)}] axes = {{{", ".join(map(str, axes))}}}>
    {{ y = ReduceMean<keepdims = {keepdims}>(x, axes) }}
    """
    model = ir.from_proto(onnx.parser.parse_model(text))
    pool_means_(model)
    (node,) = model.graph
    assert node.op_type == operator
    assert len(node.inputs) == (1 if operator == "GlobalAveragePool" else 2)
