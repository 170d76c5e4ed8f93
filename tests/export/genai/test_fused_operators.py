"""What is fused around attention and norms, and that answers stay the same."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser, shape_inference

from compress.export.genai.decoder import fuse_operators_

NORM = """<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
norm (float[batch, length, 4] x, float[{added}] y)
 => (float[batch, length, 4] out, float[batch, length, 4] sum)
<float[4] weight = {{1, 2, 3, 4}}, float tiny = {{0.1}}, float two = {{{power}}},
 int64[1] axis = {{{axis}}}, int64[3] wide = {{0, 0, -1}}, int64[4] heads = {{0, 0, 2, 2}}>
{{
  sum = Add(x, y)
  square = Pow(sum, two)
  mean = ReduceMean(square, axis)
  above = Add(mean, tiny)
  root = Sqrt(above)
  even = Div(sum, root)
  scaled = Mul(even, weight)
  apart = Reshape(scaled, heads)
  again = Reshape(apart, wide)
  out = Relu(again)
}}"""


def answers(model: ir.Model, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(None, feed)


@pytest.mark.parametrize(
    ("added", "power", "axis", "fused"),
    [
        (("batch", "length", 4), 2, -1, 1),
        ((4,), 2, -1, 0),  # a bias
        (("batch", "length", 4), 4, -1, 0),
        (("batch", "length", 4), 2, 1, 0),
    ],
)
def test_what_is_fused_answers_the_same(added, power, axis, fused) -> None:
    text = NORM.format(added=", ".join(map(str, added)), power=power, axis=axis)
    model = ir.from_proto(shape_inference.infer_shapes(parser.parse_model(text)))
    sizes = {"batch": 2, "length": 3}
    drawn = np.random.default_rng(0)
    feed = {
        name: drawn.normal(size=[sizes.get(s, s) for s in shape]).astype(np.float32)
        for name, shape in (("x", ("batch", "length", 4)), ("y", added))
    }
    expected = answers(model, feed)
    fuse_operators_(model)
    for before, after in zip(expected, answers(model, feed), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5)
    kinds = [node.op_type for node in model.graph]
    assert kinds.count("SkipSimplifiedLayerNormalization") == fused
    assert "Reshape" not in kinds
    assert ("Div" in kinds) != fused  # nothing of a fused norm is left
