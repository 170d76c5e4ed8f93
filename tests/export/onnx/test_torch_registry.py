"""torch's table of ONNX operators, read once, and the types that it promotes."""

import copy
import logging

import pytest
import torch
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._fx_passes import insert_type_promotion_nodes
from torch.onnx._internal.exporter._registration import ONNXRegistry

from compress.export.onnx.lowering import cached_registry, known_types


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Drop what it says of a library that is not installed."""
    caplog.set_level(logging.ERROR, "torch.onnx._internal.exporter._registration")


def test_the_table_is_the_one_that_torch_makes() -> None:
    own = vars(ONNXRegistry)["from_torchlib"], TracedOnnxFunction.function_ir
    made = ONNXRegistry.from_torchlib(opset_version=20)
    with cached_registry():
        had = ONNXRegistry.from_torchlib(opset_version=20)
    assert had.functions == made.functions
    assert had.opset_version == 20
    assert (vars(ONNXRegistry)["from_torchlib"], TracedOnnxFunction.function_ir) == own


def test_what_one_export_adds_is_not_in_the_next_ones() -> None:
    relu = torch.ops.aten.relu.default
    with cached_registry():
        first = ONNXRegistry.from_torchlib(opset_version=20)
        first.register_op(relu, lambda x: x)
        second = ONNXRegistry.from_torchlib(opset_version=20)
    own, *usual = first.get_decomps(relu)
    assert own.is_custom
    assert second.get_decomps(relu) == usual
    assert not any(form is own for form in usual)


def test_tables_are_of_the_operator_set_asked_for() -> None:
    with cached_registry():
        sizes = {v: len(ONNXRegistry.from_torchlib(opset_version=v).functions) for v in (18, 23)}
        assert ONNXRegistry.from_torchlib(opset_version=23).opset_version == 23
    assert sizes[18] < sizes[23]


def test_types_are_promoted_without_running_what_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            return (x.relu().sin() * count + 1.5) ** 2

    shapes = ({0: torch.export.Dim("batch")},) * 2
    inputs = torch.rand(3, 4), torch.ones(3, 4, dtype=torch.int64)
    program = torch.export.export(Net(), inputs, dynamic_shapes=shapes)

    def promoted() -> tuple[list[object], int]:
        run: list[torch.fx.Node] = []

        def running(interpreter: torch.fx.Interpreter, node: torch.fx.Node) -> object:
            run.extend([node] * (node.op == "call_function"))
            return really(interpreter, node)

        really, graph = torch.fx.Interpreter.run_node, copy.deepcopy(program.graph_module)
        with monkeypatch.context() as patch:
            patch.setattr(torch.fx.Interpreter, "run_node", running)
            insert_type_promotion_nodes(graph)
        values = [node.meta["val"] for node in graph.graph.nodes if node.op == "call_function"]
        return [str(graph.graph), [(value.dtype, value.shape) for value in values]], len(run)

    expected, ran = promoted()
    assert "convert_element_type" in expected[0]
    with known_types():
        assert promoted() == (expected, 2)  # the conversion, and the product after it
    assert ran > 4
