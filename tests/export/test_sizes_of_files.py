"""Models of which only calls show the sizes that named axes may have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError
from torch import nn

import compress
from compress.artifacts.graph_model import GraphModel
from compress.common.forward import accept_any_batch
from compress.common.signature import AxisBounds, Signature, TensorSpec
from compress.export.imported.exported_files import import_file, signature_of
from compress.graph.torch_export import export_program
from compress.quantization.pt2e.graph_capture import capture

BATCH, HEIGHT, WIDTH = (torch.export.Dim(name) for name in ("batch", "height", "width"))


class Pyramid(nn.Module):
    """Joins a map with one of half its size, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(n, 4, 3, 2, padding=1) for n in (3, 4))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        large = self.first(image)
        small = nn.functional.interpolate(self.second(large), scale_factor=2.0)
        return torch.cat([large, small], 1).mean((2, 3))


class Reader(nn.Module):
    """Reads a line of text in steps of 8 pixels, one line a call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, 8, padding=1)
        self.rnn, self.head = nn.GRU(4, 6), nn.Linear(6, 5)

    def forward(self, line: torch.Tensor) -> torch.Tensor:
        steps = self.body(line).mean(2).permute(2, 0, 1)
        answers, _ = self.rnn(steps)
        flat = answers.reshape(answers.shape[0] * answers.shape[1], 6)
        return self.head(flat).reshape(answers.shape[0], answers.shape[1], 5)


def test_the_multiple_of_a_size_is_found_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "pyramid.onnx"
    value, conv = helper.make_tensor_value_info, {"kernel_shape": [3, 3], "pads": [1] * 4}
    nodes = [
        helper.make_node("Conv", ["image", "w0"], ["large"], strides=[2, 2], **conv),
        helper.make_node("Conv", ["large", "w1"], ["half"], strides=[2, 2], **conv),
        helper.make_node("Resize", ["half", "", "scales"], ["small"], mode="nearest"),
        helper.make_node("Concat", ["large", "small"], ["both"], axis=1),
        helper.make_node("GlobalAveragePool", ["both"], ["y"]),
    ]
    weights = {
        "w0": np.ones((4, 3, 3, 3), np.float32),
        "w1": np.ones((4, 4, 3, 3), np.float32),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    graph = helper.make_graph(
        nodes,
        "pyramid",
        [value("image", TensorProto.FLOAT, ["n", 3, "height", "width"])],
        [value("y", TensorProto.FLOAT, ["n", 8, 1, 1])],
        [numpy_helper.from_array(w, name) for name, w in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), file)
    signature = signature_of("onnx", file)
    assert signature is not None
    assert signature.axes == dict.fromkeys(("height", "width"), AxisBounds(min=8, multiple=4))
    model = import_file("onnx", file, signature, tmp_path / "model", to_module=True)
    exported = compress.export_onnx(model, tmp_path / "again.onnx")
    (image,) = onnx.load(exported.payload_path).graph.input
    dims = [d.dim_param or d.dim_value for d in image.type.tensor_type.shape.dim]
    assert dims == ["n", 3, "height", "width"]
    with exported.open() as predict, torch.no_grad():
        x = torch.randn(3, 3, 20, 12)
        torch.testing.assert_close(predict(x)[0], model.load()(x)["y"])


def test_a_graph_for_multiples_of_a_size_is_read_again(tmp_path: Path) -> None:
    spec = TensorSpec(name="image", shape=("batch", 3, "height", "width"))
    bounds = dict.fromkeys(("height", "width"), AxisBounds(min=64, multiple=32))
    signature = Signature(inputs=(spec,), axes=bounds)
    program = export_program(Pyramid().eval(), signature)
    x = torch.randn(2, 3, 96, 64)
    found = GraphModel.create(tmp_path / "graph", program, signature).program()
    assert found.range_constraints == program.range_constraints
    torch.testing.assert_close(found.module()(x), program.module()(x))


def test_the_smallest_size_and_a_fixed_batch_are_found(tmp_path: Path) -> None:
    file = tmp_path / "pool.onnx"
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MaxPool", ["sound"], ["p"], kernel_shape=[5]),
        helper.make_node("ReduceMax", ["p"], ["m"], axes=[2], keepdims=0),
        helper.make_node("Reshape", ["m", "one"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "pool",
        [value("sound", TensorProto.FLOAT, ["batch", 2, "length"])],
        [value("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(np.array([1, 2]), "one")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), file)
    signature = signature_of("onnx", file)
    assert signature is not None
    assert signature.inputs[0].shape == (1, 2, "length")
    # Twice the 5 that it takes, where one number is left to pool.
    assert signature.axes == {"length": AxisBounds(min=10)}


@pytest.mark.parametrize(("declared", "batch"), [([], 1), (["batch"], "batch"), (None, "batch")])
def test_a_batch_of_more_outputs_than_declared_is_fixed(
    declared: list[str] | None, batch: int | str, tmp_path: Path
) -> None:
    file, value = tmp_path / "score.onnx", helper.make_tensor_value_info
    nodes = [
        helper.make_node("ReduceMean", ["sound"], ["m"], axes=[1, 2], keepdims=1),
        helper.make_node("Squeeze", ["m"], ["y"]),
    ]
    inputs = [value("sound", TensorProto.FLOAT, ["batch", 2, "length"])]
    outputs = [value("y", TensorProto.FLOAT, declared)]
    graph = helper.make_graph(nodes, "score", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)]), file)
    signature = signature_of("onnx", file)
    assert signature is not None
    assert signature.inputs[0].shape == (batch, 2, "length")


def test_a_file_that_cannot_be_opened_has_the_sizes_that_it_tells(tmp_path: Path) -> None:
    value, file = helper.make_tensor_value_info, tmp_path / "unknown.onnx"
    x, y = (value(name, TensorProto.FLOAT, ["n", "length", 3]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("Unknown", ["x"], ["y"], domain="own")], "g", [x], [y]
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    onnx.save(helper.make_model(graph, opset_imports=versions), file)
    signature = signature_of("onnx", file)
    assert signature is not None
    assert (signature.inputs[0].shape, signature.axes) == (("n", "length", 3), {})


def test_a_state_beside_one_sample_is_passed_whole() -> None:
    specs = [("sound", (1, 3)), ("state", (4, 1, 2))]
    signature = Signature(inputs=tuple(TensorSpec(name=n, shape=s) for n, s in specs))
    predict = accept_any_batch(lambda sound, state: (sound.sum() + state.sum(),), signature)
    assert predict(torch.ones(1, 3), torch.ones(4, 1, 2))[0] == 11


def test_what_is_one_in_the_example_is_no_constant() -> None:
    spec = TensorSpec(name="line", shape=(1, 1, 16, "width"))
    program = export_program(Reader(), Signature(inputs=(spec,)))
    answers = [program.module()(torch.zeros(1, 1, 16, width)) for width in (16, 72)]
    assert [tuple(x.shape) for x in answers] == [(2, 1, 5), (9, 1, 5)]


def test_recurrent_layers_of_a_quantized_graph_take_any_length() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(4, 6, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    spec = TensorSpec(name="x", shape=("batch", "length", 4))
    graph = capture(Steps().eval(), Signature(inputs=(spec,)))
    assert graph(torch.zeros(3, 5, 4)).shape == (3, 5, 6)


@pytest.mark.parametrize(
    ("bounds", "sizes", "written"),
    [
        ({"multiple": 32}, {8: 32, 70: 64, 96: 96}, "32 or more, in multiples of 32"),
        ({"min": 6, "max": 10, "multiple": 2}, {1: 6, 9: 8, 99: 10}, "6 to 10, in multiples of 2"),
        ({"min": 6}, {1: 6, 9: 9}, "6 or more"),
    ],
)
def test_sizes_are_multiples(bounds, sizes: dict[int, int], written: str) -> None:
    axis = AxisBounds(**bounds)
    assert {size: axis.nearest(size) for size in sizes} == sizes
    assert str(axis) == written
    assert AxisBounds.model_validate(axis.model_dump()) == axis
    assert all((size in axis) == (size == sizes[size]) for size in sizes)


def test_bounds_that_are_no_multiples_are_refused() -> None:
    with pytest.raises(ValidationError, match="max 70 is not a multiple of 32"):
        AxisBounds(multiple=32, max=70)
