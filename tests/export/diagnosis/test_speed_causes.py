"""What causes of a slow file measure and try; how long files take is not asserted."""

import math
from pathlib import Path

import pytest

from compress.core.context import Context
from compress.core.diagnosis.cause import RefusedStage
from compress.export.diagnosis.causes import FloatIslands, LonePairs, Noise, OddWidths, SlowIntegers
from compress.export.diagnosis.costs import SpeedDiagnosis, SpeedGate
from compress.export.diagnosis.profile import Profile, plain_export
from compress.export.onnx.stage import ExportOnnx
from compress.profiling.quantiles import Interval
from compress.pruning.prune_channels import PruneChannels
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import IMAGE, network_of

NETS = """
from torch import nn

def net():
    convs = [nn.Conv2d(1, 17, 3, padding=1), nn.ReLU(), nn.Conv2d(17, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
"""
GATE = SpeedGate(Interval(1.4, 1.6), 1.5, 2.8, higher_passes=True, batch=1, earlier=1.42)
Refused = RefusedStage[SpeedDiagnosis]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> SpeedDiagnosis:
    """Return a diagnosis of a float file with a layer of 17 channels; nothing is faster."""
    folder = tmp_path_factory.mktemp("widths")
    source = network_of(folder, NETS, "widths:net", IMAGE)
    model, names = plain_export(source)
    inputs = source.signature.example(batch=1)
    profile = Profile.measure(model, names, inputs, 1)
    tried: list[tuple[str, dict]] = []

    def rerun(stage: str, settings: dict) -> None:
        tried.append((stage, dict(settings)))

    context = Context(root=folder / "onnx")
    found = SpeedDiagnosis(model, names, GATE, 2.0, profile, profile, rerun, context, [inputs])
    found.tried = tried
    return found


def refused(stage: object, measured: SpeedDiagnosis) -> Refused:
    return RefusedStage(stage, None, None, measured.context, (), measured, 0.0)


def test_what_is_missing_follows_from_the_lower_end_of_the_speedup(
    measured: SpeedDiagnosis,
) -> None:
    assert GATE.factor == pytest.approx(2)
    assert measured.missing_ms == pytest.approx(1.0)
    assert measured.returned(0.25) == pytest.approx(0.25)
    slow = SpeedGate(Interval(4.0, 6.0), 5.0, 2.5, higher_passes=False, batch=1, earlier=None)
    assert slow.factor == pytest.approx(2)


@pytest.mark.parametrize(
    ("low", "high", "limit", "earlier", "spread"),
    [
        (1.4, 1.6, 1.5, 1.4, 1.0),  # half as wide as the distance
        (1.4, 1.5, 2.4, 1.4, 0.05),
        (1.4, 1.5, 1.9, 1.0, 0.8),  # the run found another value
        (1.4, 1.5, 1.9, 1.8, 4.0),  # which was nearer
        (1.4, 1.5, 1.4, None, math.inf),
    ],
)
def test_noise_is_how_far_measurements_lie_apart(
    measured: SpeedDiagnosis,
    low: float,
    high: float,
    limit: float,
    earlier: float | None,
    spread: float,
) -> None:
    gate = SpeedGate(Interval(low, high), (low + high) / 2, limit, True, 1, earlier)
    assert gate.spread_in_margin == pytest.approx(spread)
    stage = refused(ExportOnnx(name="onnx"), measured)
    assert Noise().measure(stage, "") == measured.gate.spread_in_margin


def test_channels_that_fill_no_block_are_counted_and_rounded(measured: SpeedDiagnosis) -> None:
    cause = OddWidths()
    stage = refused(PruneChannels(name="pruned", ratio=0.5, round_to=1), measured)
    values = {name: cause.measure(stage, name) for name in measured.names}
    assert values == {"0": pytest.approx(15 / 17), "2": 0.0, "6": None}
    measured.tried.clear()
    assert cause.returned(stage, ["0"]) == 0 and not cause.repairs(stage, ["0"])
    assert measured.tried == [("pruned", {"round_to": 16}), ("pruned", {"round_to": 8})]
    whole = refused(PruneChannels(name="whole", ratio=0.5, round_to=16), measured)
    assert cause.returned(whole, ["0"]) == 0, "it rounds to blocks already"
    widths = refused(PruneChannels(name="widths", widths={"0": 17}), measured)
    measured.tried.clear()
    cause.returned(widths, ["0"])
    assert measured.tried == [("widths", {"widths": {"0": w}}) for w in (16,)], "once for both"


def test_a_float_file_has_no_causes_of_integers(measured: SpeedDiagnosis) -> None:
    stage = refused(QuantizeStatic(name="int8"), measured)
    for cause in (FloatIslands(), LonePairs(), SlowIntegers()):
        assert cause.measure(stage, "0") is None
    assert Path(measured.context.root).name == "onnx"


def test_formats_without_kernels_are_mended_by_those_that_have_some(
    measured: SpeedDiagnosis,
) -> None:
    stage = refused(QuantizeStatic(name="int8", activation_bits=16, exclude=("6",)), measured)
    found = [repair.settings for repair in LonePairs().repairs(stage, ["0"])]
    assert found == [{"activation_bits": 8}, {"exclude": ["6", "0"]}]
    stage = refused(QuantizeStatic(name="int8", target="xnnpack"), measured)
    assert {"target": "onnxruntime-cpu"} in [
        repair.settings for repair in LonePairs().repairs(stage, ["0"])
    ]
