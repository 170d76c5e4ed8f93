"""Zero padding goes into the convolutions that read it, and changes no output."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import compress
from compress.export.onnx.passes.float_layers import fold_zero_pads_

RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(2, 4, 7, 9)).astype(np.float32)
SYMMETRIC, ASYMMETRIC = [0, 0, 1, 2, 0, 0, 1, 2], [0, 0, 0, 1, 0, 0, 3, 0]
FLOAT = "p = Pad(x, cells, fill) y = Conv(p, w)"
ISLAND = """
    q = QuantizeLinear(x, scale, zero) d = DequantizeLinear(q, scale, zero)
    p = Pad(d, cells, fill)
    r = QuantizeLinear(p, {scale}, {zero}) e = DequantizeLinear(r, {scale}, {zero})
    y = Conv<pads = [1, 0, 0, 2]>(e, w)
"""
INTEGERS = ISLAND.format(scale="scale", zero="zero")
BEFORE_INTEGERS = """
    p = Pad(x, cells, fill)
    r = QuantizeLinear(p, scale, zero) e = DequantizeLinear(r, scale, zero) y = Conv(e, w)
"""


def model_of(
    body: str, cells: list[int] = ASYMMETRIC, fill: float = 0.0, outputs: str = "y"
) -> ir.Model:
    """Return a model of float images with 4 channels whose Pad has these cells."""
    typed = ", ".join(f"float[n, c_{name}, h_{name}, w_{name}] {name}" for name in outputs)
    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    padded (float[batch, 4, height, width] x) => ({typed})
    <int64[4] axes = {{0, 1, 3, 2}},
     int64[8] cells = {{{", ".join(map(str, cells))}}}, float fill = {{{fill}}},
     float scale = {{0.03125}}, uint8 zero = {{100}}, float half = {{0.015625}}, uint8 low = {{90}}>
    {{ {body} }}
    """
    proto = onnx.parser.parse_model(text)
    weight = RNG.normal(size=(3, 4, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return ir.from_proto(proto)


def folded(model: ir.Model) -> list[str]:
    """Fold a model's Pads; return its operators after checking that no output changed."""
    before = outputs_of(model)
    fold_zero_pads_(model)
    for expected, found in zip(before, outputs_of(model), strict=True):
        np.testing.assert_array_equal(found, expected)
    return [node.op_type for node in model.graph]


def outputs_of(model: ir.Model) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    # As written: its own optimizer may fold a Pad, too.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, {"x": IMAGE})


@pytest.mark.parametrize("cells", [SYMMETRIC, ASYMMETRIC])
def test_padding_goes_into_the_convolution(cells: list[int]) -> None:
    assert folded(model_of(FLOAT, cells)) == ["Conv"]
    kept = ["QuantizeLinear", "DequantizeLinear", "Conv"]
    assert folded(model_of(INTEGERS, cells)) == kept
    assert folded(model_of(BEFORE_INTEGERS, cells)) == kept


def test_it_is_added_to_the_padding_that_the_convolution_has() -> None:
    model = model_of(INTEGERS, ASYMMETRIC)
    fold_zero_pads_(model)
    assert model.graph.node(-1).attributes["pads"].as_ints() == (1, 1, 3, 2)


@pytest.mark.parametrize(
    ("body", "cells", "fill"),
    [
        pytest.param(FLOAT, SYMMETRIC, 1.0, id="ones"),
        pytest.param(INTEGERS, SYMMETRIC, 0.03125, id="one step of the integers"),
        pytest.param(INTEGERS, [0, 0, 1, 1, 0, 0, -1, 1], 0.0, id="cropped"),
        pytest.param(INTEGERS, [1, 0, 0, 0, 0, 0, 0, 0], 0.0, id="samples"),
        pytest.param(ISLAND.format(scale="half", zero="zero"), SYMMETRIC, 0.0, id="scale"),
        pytest.param(ISLAND.format(scale="scale", zero="low"), SYMMETRIC, 0.0, id="zero point"),
        pytest.param(FLOAT.replace("Pad", 'Pad<mode = "edge">'), SYMMETRIC, 0.0, id="edge"),
        pytest.param(
            FLOAT.replace("fill)", "fill, axes)"), ASYMMETRIC, 0.0, id="axes in another order"
        ),
        pytest.param(f"{FLOAT} z = Conv<pads = [9, 9, 9, 9]>(x, p)", SYMMETRIC, 0.0, id="weight"),
        pytest.param(
            INTEGERS.replace("(r, scale, zero)", "(r, scale, low)"), SYMMETRIC, 0.0, id="shifted"
        ),
        pytest.param(f"{FLOAT} z = Relu(p)", SYMMETRIC, 0.0, id="another reader"),
        pytest.param(f"{INTEGERS} z = Relu(e)", SYMMETRIC, 0.0, id="another reader of integers"),
        pytest.param(f"{INTEGERS} z = Identity(p)", SYMMETRIC, 0.0, id="a reader of floats"),
    ],
)
def test_other_padding_stays(body: str, cells: list[int], fill: float) -> None:
    model = model_of(body, cells, fill, outputs="yz" if "z =" in body else "y")
    before = [node.op_type for node in model.graph]
    assert folded(model) == before


def test_padding_of_channels_stays() -> None:
    body = "s = Slice(x, low_axis, high_axis, axis) p = Pad(s, cells, fill) y = Conv(p, w)"
    places = "".join(
        f"{name} = Constant<value_ints = [{place}]>() "
        for name, place in {"low_axis": 0, "high_axis": 3, "axis": 1}.items()
    )
    assert "Pad" in folded(model_of(places + body, [0, 1, 1, 1, 0, 0, 1, 1]))


def test_an_output_of_the_model_stays_padded() -> None:
    assert folded(model_of(FLOAT, outputs="yp")) == ["Pad", "Conv"]


def test_all_convolutions_that_read_it_pad() -> None:
    both = f"{INTEGERS} f = DequantizeLinear(r, scale, zero) z = Conv<strides = [2, 2]>(f, w)"
    assert "Pad" not in folded(model_of(both, outputs="yz"))
    assert folded(model_of(f"{FLOAT} z = Conv(p, w)", outputs="yz")) == ["Conv", "Conv"]


def test_padding_of_padding_goes_into_the_convolution() -> None:
    twice = INTEGERS.replace("y =", "p2 = Pad(e, cells, fill) y =").replace("(e, w)", "(p2, w)")
    rounded = """
        r2 = QuantizeLinear(p2, scale, zero) e2 = DequantizeLinear(r2, scale, zero) y =
    """
    for body in (twice, twice.replace("y =", rounded).replace("(p2, w)", "(e2, w)")):
        assert folded(model_of(body)) == ["QuantizeLinear", "DequantizeLinear", "Conv"]


@pytest.mark.slow
def test_a_quantized_network_with_padding_of_tensorflow_has_none_left(tmp_path: Path) -> None:
    torch.manual_seed(0)
    same = nn.ZeroPad2d((0, 1, 0, 1))
    depthwise = nn.Conv2d(8, 8, 3, stride=2, groups=8)
    first, last = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 4, 1)
    module = nn.Sequential(same, first, nn.ReLU6(), same, depthwise, last)
    images = torch.randn(32, 3, 32, 32)
    graph = compress.quantize_static(
        module.eval(), calibration=images, progress=False, out=tmp_path / "int8"
    )
    exported = compress.export_onnx(graph, progress=False, out=tmp_path / "onnx")
    facts = exported.manifest.facts
    assert "Pad" not in facts["operators"]
    assert facts["integer_kernels"] == {"QLinearConv": 3}
