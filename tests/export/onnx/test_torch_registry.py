"""torch's table of ONNX operators, read once."""

import logging

import pytest
import torch
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry

from export.onnx.lowering import cached_registry


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
