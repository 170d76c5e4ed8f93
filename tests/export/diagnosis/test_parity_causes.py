"""Causes of outputs that differ: the traced graph, rewriting, float32, an operator, an axis."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxscript import opset18

from compress.core.context import Context
from compress.core.diagnosis.cause import RefusedStage
from compress.export.diagnosis.causes import PARITY_CAUSES
from compress.export.diagnosis.costs import ParityDiagnosis
from compress.export.onnx import lowering
from compress.export.onnx.stage import ExportOnnx
from tests.export.builders import ROWS, network_of

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x).relu())

class Smooth(Net):
    def forward(self, x):
        return self.last(nn.functional.softplus(self.first(x)))

class Otherwise(Net):
    def forward(self, x):
        return super().forward(x) * (1.25 if torch.compiler.is_exporting() else 1.0)

class Cancelling(Net):
    def forward(self, x):
        wide = 10000 * self.first(x).sum(1, keepdim=True)
        return super().forward(x) + wide / 3 - wide / 3.0001
"""
BAKED_AXIS, OTHER_GRAPH, REWRITTEN_GRAPH, FLOAT32, WRONG_OPERATOR = PARITY_CAUSES
Refused = RefusedStage[ParityDiagnosis]


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., Refused]:
    """Return the diagnosis of a network's export, with changed weights on request."""

    def diagnose(
        name: str, change: Callable[[ir.Model], None] = lambda model: None, **settings: str
    ) -> Refused:
        source = network_of(tmp_path, NETS, f"wrong_{name.lower()}:{name}", ROWS)
        context = Context(root=tmp_path / "onnx")
        stage = ExportOnnx(name="onnx", **settings)
        model = stage.translated(source)[0]
        change(model)

        def rerun(name: str, changed: dict) -> ir.Model:
            return ExportOnnx(name=name, **changed).translated(source)[0]

        found = ParityDiagnosis(stage, source, model, context, rerun)
        return RefusedStage(stage, source, source, context, (), found, 0.0)

    return diagnose


def scale_weight(model: ir.Model) -> None:
    """Make the second layer's weights wrong by a tenth."""
    weight = model.graph.initializers["last.weight"]
    assert weight.const_value is not None
    weight.const_value = ir.tensor((1.1 * weight.const_value.numpy()).astype(np.float32))


def test_a_right_export_has_no_cause(refused: Callable[..., Refused]) -> None:
    right = refused("Net")
    assert OTHER_GRAPH.measure(right, "") < OTHER_GRAPH.limit
    assert right.measured.wrong_layer is None
    assert WRONG_OPERATOR.measure(right, "first") is None
    assert REWRITTEN_GRAPH.measure(right, "") is None
    assert BAKED_AXIS.measure(right, "batch") < BAKED_AXIS.limit


def test_code_that_goes_another_way_while_it_is_exported(refused: Callable[..., Refused]) -> None:
    wrong = refused("Otherwise")
    value = OTHER_GRAPH.measure(wrong, "")
    assert value == pytest.approx(0.25, abs=0.01)
    assert OTHER_GRAPH.recovered_share(wrong, ()) == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_an_operator_with_a_wrong_form_is_named(
    refused: Callable[..., Refused], monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_relu(self, beta=1.0, threshold=20.0):
        return opset18.Relu(self)

    softplus = torch.ops.aten.softplus.default
    monkeypatch.setitem(lowering.TRANSLATIONS, softplus, as_relu)
    wrong = refused("Smooth")
    found = wrong.measured.wrong_layer
    assert found is not None and found.operator == "aten.softplus.default"
    assert WRONG_OPERATOR.measure(wrong, str(found)) > 0.01
    assert OTHER_GRAPH.measure(wrong, "") < OTHER_GRAPH.limit
    assert WRONG_OPERATOR.measure(wrong, "first") is None


def test_rewriting_is_the_cause_where_the_file_without_it_is_right(
    refused: Callable[..., Refused],
) -> None:
    wrong = refused("Net", scale_weight, optimize="basic")
    assert REWRITTEN_GRAPH.measure(wrong, "") > 0.99
    assert REWRITTEN_GRAPH.recovered_share(wrong, ()) == REWRITTEN_GRAPH.measure(wrong, "")
    assert wrong.measured.measured == 1, "made once"
    assert REWRITTEN_GRAPH.repairs(wrong, ())[0].settings == {"optimize": "none"}
    right = refused("Net", scale_weight)
    assert REWRITTEN_GRAPH.measure(right, "") is None, "it is not rewritten"


def test_float32_is_the_cause_where_the_source_is_off_by_as_much(
    refused: Callable[..., Refused],
) -> None:
    wrong = refused("Cancelling")
    assert wrong.measured.own_error > 1e-4
    if wrong.measured.difference:  # else both sum in the same order
        assert FLOAT32.measure(wrong, "") > FLOAT32.limit
    clear = refused("Net", scale_weight)
    assert FLOAT32.measure(clear, "") < 0.01


def test_an_axis_is_baked_in_where_other_sizes_alone_are_wrong(
    refused: Callable[..., Refused], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = refused("Net")
    errors = {"seeded": 1e-7, "batch of 3": 0.4, "batch of 8": float("inf"), "zeros": 1e-7}
    monkeypatch.setitem(wrong.measured.__dict__, "errors", errors)
    assert BAKED_AXIS.measure(wrong, "batch") > 1e6
    assert BAKED_AXIS.measure(wrong, "channels") is None
    everywhere = dict.fromkeys(errors, 0.4)
    monkeypatch.setitem(wrong.measured.__dict__, "errors", everywhere)
    assert BAKED_AXIS.measure(wrong, "batch") == pytest.approx(1)
