"""Bytes of a file by module: tables, copies, values of a call."""

from dataclasses import replace
from pathlib import Path

import pytest

from compress.core.context import Context
from compress.core.diagnosis.cause import RefusedStage
from compress.export.diagnosis.causes import COUNTED_CAUSES
from compress.export.diagnosis.costs import SizeDiagnosis, sizes_by_module, tensor_sizes
from compress.export.diagnosis.profile import plain_export
from compress.export.onnx.stage import ExportOnnx
from tests.export.builders import TOKENS, network_of

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.copy = nn.Embedding(200, 8), nn.Embedding(200, 8)
        self.copy.weight.data.copy_(self.table.weight.data)
        self.fc = nn.Linear(8, 16)

    def forward(self, tokens):
        return self.fc(self.table(tokens) + self.copy(tokens.flip(1)))
"""

CAUSES = {cause.key: cause for cause in COUNTED_CAUSES}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> RefusedStage[SizeDiagnosis]:
    folder = tmp_path_factory.mktemp("sizes")
    source = network_of(folder, NETS, "sized:Net", TOKENS)
    context = Context(root=folder / "onnx")
    stage = ExportOnnx(name="onnx")
    file = stage.run_checked(source, context)
    found = SizeDiagnosis(
        file, source, lambda name, settings: None, context, 3200.0, memory_batch=2
    )
    return RefusedStage(stage, source, file, context, (), found, 0.0)


@pytest.mark.slow
def test_tensors_belong_to_the_modules_that_read_them(measured, tmp_path: Path) -> None:
    found = measured.measured
    assert found.names == ["fc", "table", "copy"]
    sizes = sizes_by_module(found.tensors)
    assert sizes["table"] >= 200 * 8 * 4 <= sizes["copy"]
    assert sizes["fc"] >= (8 + 1) * 16 * 4
    tables = {t.module for t in found.tensors if t.is_table}
    assert tables == {"table", "copy"}
    assert [t.module for t in found.tensors if t.is_copy] == ["copy"]


@pytest.mark.slow
def test_a_copy_is_a_cause_by_its_share_of_the_file(measured) -> None:
    cause, table = CAUSES["stored_twice"], 200 * 8 * 4
    value = cause.measure(measured, "copy")
    assert value == pytest.approx(table / measured.measured.whole)
    assert value > cause.limit and cause.measure(measured, "table") is None
    assert cause.recovered_share(measured, ["copy"]) == pytest.approx(table / 3200)


@pytest.mark.slow
def test_values_of_a_call_are_a_cause_where_they_outweigh_the_weights(measured) -> None:
    found = measured.measured
    largest = max(found.activations, key=lambda module: found.activations[module])
    # Two samples of 8 tokens with 16 outputs each.
    assert largest == "fc" and found.activations["fc"] == 2 * 8 * 16 * 4
    assert found.peak_values >= found.activations["fc"] + 2 * 8 * 8 * 4
    assert CAUSES["large_activation"].measure(measured, "fc") < CAUSES["large_activation"].limit


@pytest.mark.slow
def test_a_plain_export_has_the_same_tensors(measured) -> None:
    model, names = plain_export(measured.before)
    plain = sizes_by_module(tensor_sizes(model, names))
    assert plain["table"] == sizes_by_module(measured.measured.tensors)["table"]


@pytest.mark.slow
def test_weights_are_counted_without_what_shapes_take(measured) -> None:
    found = measured.measured
    weights = {"table": 200 * 8, "copy": 200 * 8, "fc": (8 + 1) * 16}
    by_module = sizes_by_module(found.tensors, "weights")
    assert {name: n for name, n in by_module.items() if n} == weights
    assert sum(weights.values()) == measured.after.parameters()
    counted = replace(found, unit="weights", missing=800)
    of_weights = replace(measured, measured=counted)
    assert CAUSES["stored_twice"].measure(of_weights, "copy") == pytest.approx(1600 / 3344)
    assert CAUSES["stored_twice"].recovered_share(of_weights, ["copy"]) == pytest.approx(2.0)
