"""Multiply-accumulates in float by module, and what other settings would bring into integers."""

from collections.abc import Callable
from typing import Any

import pytest

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.core.context import Context
from compress.core.diagnosis.cause import RefusedStage
from compress.export.diagnosis.causes import COUNTED_CAUSES
from compress.export.diagnosis.costs import MacsDiagnosis
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import images, samples

PIXELS = 8 * 8
MACS = {"stem": PIXELS * 16 * 9, "last": PIXELS * 16 * 16 * 9, "head": 16 * 4}
"""Module → multiply-accumulates of a sample."""
INNER = PIXELS * 16 * 16 * 9
"""Without the BatchNorm behind `inner`, which onnxruntime computes as a convolution, too."""
SHARE = INNER / (sum(MACS.values()) + INNER)
CAUSES = {cause.key: cause for cause in COUNTED_CAUSES}
Refused = RefusedStage[MacsDiagnosis]


@pytest.fixture(scope="module")
def refused(net: EagerModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Refused]:
    """Return what counts in a network that was quantized with some settings.

    Any other settings bring all layers into integers.
    """
    root = tmp_path_factory.mktemp("macs")
    context = Context(root=root, data=samples(images()))
    export = ExportOnnx(name="onnx")

    def quantized(folder: str, **settings: Any) -> tuple[QuantizeStatic, GraphModel]:
        stage = QuantizeStatic(name="int8", calibration_samples=32, **settings)
        return stage, stage.run_checked(net, context.with_root(root / folder / "int8"))

    in_integers = export.translated(quantized("all")[1])[0]

    def count(missing: float, **settings: Any) -> Refused:
        folder = "-".join(settings)
        stage, graph = quantized(folder, **settings)
        file = export.run_checked(graph, context.with_root(root / folder / "onnx"))
        found = MacsDiagnosis(file, net, lambda name, s: in_integers, context, missing)
        assert 1 - found.profile.float_share == pytest.approx(file.fact("integer_share"))
        return RefusedStage(stage, net, file, context, (), found, 0.0)

    return count


@pytest.mark.slow
def test_a_layer_left_out_is_what_float_kernels_multiply(refused: Callable[..., Refused]) -> None:
    left = refused(SHARE / 2, exclude=("inner",))
    found, cause = left.measured, CAUSES["excluded_layers"]
    batch = found.batches[0][0].shape[0]
    inner = {"inner": batch * INNER}
    assert found.float_profile.float_macs == {m: batch * n for m, n in MACS.items()} | inner
    assert found.profile.float_macs == dict.fromkeys(MACS, 0) | inner
    assert found.quantized == {"stem", "last", "head"}
    assert cause.measure(left, "inner") == pytest.approx(SHARE)
    assert cause.measure(left, "last") is None
    assert CAUSES["float_kernels"].measure(left, "inner") is None, "it is not quantized"
    assert [dict(r.settings) for r in cause.repairs(left, ["inner"])] == [{"exclude": []}]
    assert cause.recovered_share(left, ["inner"]) == pytest.approx(2.0)
    assert found.measured == 1


@pytest.mark.slow
def test_weights_in_integers_may_have_float_kernels(refused: Callable[..., Refused]) -> None:
    coarse, cause = refused(1.0, activation_bits=16), CAUSES["float_kernels"]
    assert coarse.measured.quantized == {"stem", "inner", "last", "head"}
    share = INNER / (sum(MACS.values()) + INNER)
    assert cause.measure(coarse, "inner") == pytest.approx(share)
    assert [dict(r.settings) for r in cause.repairs(coarse, [])] == [{"activation_bits": 8}]
    assert cause.recovered_share(coarse, ["inner"]) == pytest.approx(1.0)
