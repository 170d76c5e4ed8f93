"""Slices that take all of an axis go: torch's exporter writes them around recurrent layers."""

import onnx
import onnx_ir as ir
import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import program_of
from compress.common.signature import Signature, TensorSpec
from compress.export.onnx.lowering import lower
from compress.export.onnx.passes.float_layers import drop_whole_slices_


class Recurrent(torch.nn.Module):
    """A layer whose states are inputs, as of a model that hears a stream in pieces."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(torch.nn, kind)(4, 8)
        self.takes_cell = kind == "LSTM"

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return self.layer(x, (h, c) if self.takes_cell else h)[0] + c[0]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_states_of_an_only_layer_are_read_as_they_are(kind, tmp_path) -> None:
    shapes = {"x": ("length", 1, 4), "h": (1, 1, 8), "c": (1, 1, 8)}
    inputs = [TensorSpec(name=name, shape=shape) for name, shape in shapes.items()]
    signature = Signature(inputs=inputs)
    source = EagerModel.from_module(
        Recurrent(kind), signature=signature, arguments={"kind": kind}, root=tmp_path / "source"
    )
    graph = lower(program_of(source), source.signature, None).graph
    states = {*graph.inputs[1:]}
    assert not [n for n in graph if n.op_type == "Slice" and n.inputs[0] in states]


@pytest.mark.parametrize(
    ("starts", "ends", "axes", "read", "stays"),
    [
        ([0], [3], [1], "z", False),
        ([0, 0], [9, 3], [-1, 1], "z", False),
        ([0], [2], [1], "z", True),
        ([1], [3], [1], "z", True),
        ([0, 0], [3, 4], [1, 2], "z", True),
        ([0], [9], [0], "z", True),  # of an axis of unknown size
        ([0], [3], [1], "x", True),  # whose output is the model's
    ],
)
def test_only_slices_of_all_of_their_axes_go(starts, ends, axes, read, stays) -> None:
    def numbers(name: str, values: list[int]) -> str:
        return f"int64[{len(values)}] {name} = {{{', '.join(map(str, values))}}}"

    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    slices (float[batch, 3, 5] x) => (float[n, k, m] y{", float[b, h, w] z" * (read == "x")})
    <{numbers("starts", starts)}, {numbers("ends", ends)}, {numbers("axes", axes)}>
    {{ z = Slice(x, starts, ends, axes)  y = Relu({read}) }}
    """
    model = ir.from_proto(onnx.parser.parse_model(text))
    drop_whole_slices_(model)
    assert ("Slice" in [node.op_type for node in model.graph]) == stays
