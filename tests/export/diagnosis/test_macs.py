"""Multiply-accumulates in float by module, and what other settings would bring into integers."""

from pathlib import Path

import onnx
import pytest

from compress.artifacts.eager_model import EagerModel
from compress.core.context import Context
from compress.core.diagnosis.cause import RefusedStage
from compress.quantization.stages.static import QuantizeStatic
from export.diagnosis.counted_causes import ExcludedLayers, FloatKernels
from export.diagnosis.macs import MacsDiagnosis, float_macs, float_share
from export.onnx.stage import ExportOnnx
from tests.export.builders import images, samples

PIXELS = 8 * 8
MACS = {
    "stem": PIXELS * 16 * 9,
    "inner": PIXELS * 16 * 16 * 9,
    "last": PIXELS * 16 * 16 * 9,
    "head": 16 * 4,
}
"""Module → multiply-accumulates of a sample."""
INNER = MACS["inner"] / sum(MACS.values())


def diagnosis(
    net: EagerModel, folder: Path, settings: dict, missing: float = 0.5
) -> RefusedStage[MacsDiagnosis]:
    """Quantize a network, export it, and count; other settings quantize it again."""
    context = Context(root=folder, data=samples(images()))
    stage = QuantizeStatic(name="int8", calibration_samples=32, **settings)
    graph = stage.run(net, context.with_root(folder / "int8"))
    export = ExportOnnx(name="onnx")
    file = export.run(graph, context.with_root(folder / "onnx"))

    def rerun(name: str, changes: dict) -> onnx.ModelProto:
        own = QuantizeStatic(name=name, calibration_samples=32, **{**settings, **changes})
        return export.translated(own.run(net, context.with_root(folder / "rerun")))[0]

    found = MacsDiagnosis.create(file, net, missing, rerun, context)
    assert 1 - float_share(found.profile) == pytest.approx(file.fact("integer_share"))
    return RefusedStage(stage, net, file, context, (), found, 0.0)


@pytest.mark.slow
def test_a_layer_left_out_is_what_float_kernels_multiply(net: EagerModel, tmp_path: Path) -> None:
    refused = diagnosis(net, tmp_path, {"exclude": ("inner",)}, missing=INNER / 2)
    found, cause = refused.measured, ExcludedLayers()
    batch = found.inputs[0].shape[0]
    assert float_macs(found.float_profile) == {name: batch * n for name, n in MACS.items()}
    by_module = float_macs(found.profile)
    assert by_module == {**dict.fromkeys(MACS, 0), "inner": batch * MACS["inner"]}
    assert found.quantized == {"stem", "last", "head"}
    assert cause.measure(refused, "inner") == pytest.approx(INNER)
    assert cause.measure(refused, "last") is None
    assert FloatKernels().measure(refused, "inner") is None, "it is not quantized"
    assert [dict(r.settings) for r in cause.repairs(refused, ["inner"])] == [{"exclude": []}]
    assert cause.returned(refused, ["inner"]) == pytest.approx(2.0)
    assert found.measured == 1


@pytest.mark.slow
def test_weights_in_integers_may_have_float_kernels(net: EagerModel, tmp_path: Path) -> None:
    refused = diagnosis(net, tmp_path, {"activation_bits": 16}, missing=1.0)
    found, cause = refused.measured, FloatKernels()
    assert found.quantized == {*MACS}
    assert cause.measure(refused, "inner") == pytest.approx(INNER) > cause.limit
    assert [dict(r.settings) for r in cause.repairs(refused, [])] == [{"activation_bits": 8}]
    assert cause.returned(refused, ["inner"]) == pytest.approx(1.0)
