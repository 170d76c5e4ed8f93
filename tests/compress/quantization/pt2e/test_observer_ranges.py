from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.quantization.stages.base import CalibrationData
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import (
    IMAGE,
    NETWORKS,
    build_model,
    images,
    labelled_images,
)

ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
TWO_INPUTS = Signature(
    inputs=(
        TensorSpec(name="image", shape=("batch", 1, 8, 8)),
        TensorSpec(name="context", shape=("batch", 4)),
    ),
    outputs=(OutputSpec(name="logits"), OutputSpec(name="features")),
)


def model_of(path: Path, factory: str, signature: Signature, **changed: float) -> EagerModel:
    """Return a network with the first unit of each named tensor set to a number."""
    torch.manual_seed(0)
    recipe = Recipe(factory=f"networks:{factory}")
    state = recipe.build(NETWORKS).state_dict()
    for name, value in changed.items():
        state[name.replace("__", ".")][0] = value
    return EagerModel.create(path, recipe, state, signature, folder=NETWORKS)


def context_of(path: Path, *inputs: torch.Tensor) -> Context:
    rows = [(tuple(x[i] for x in inputs), torch.tensor(0)) for i in range(len(inputs[0]))]
    return Context(root=path, data=Splits({"train": rows, "val": rows}, batch_size=32))


def range_of_input(graph: GraphModel) -> tuple[float, float]:
    """Return what the input may be without being cut off by more than rounding."""
    (image,) = (n for n in graph.program().graph.nodes if n.name == "image")
    (quantize,) = (n for n in image.users if "quantize_per_tensor" in str(n.target))
    _, scale, zero_point, low, high, _ = quantize.args
    return (low - 0.5 - zero_point) * scale, (high + 0.5 - zero_point) * scale


@pytest.mark.slow
@pytest.mark.parametrize("observer", ["percentile", "moving_average", "histogram", "mse"])
def test_the_saturated_share_is_counted_exactly(tmp_path: Path, observer: str) -> None:
    x = images()
    x[32:] *= 1.5
    settings = {"observer": observer, "weight_bits": 8, "calibration_samples": 64}
    settings |= {"percentile": 95} if observer == "percentile" else {}
    model = model_of(tmp_path / "source", "mobilenet", IMAGE)
    graph = QuantizeStatic.model_validate(settings)(model, context_of(tmp_path / "int8", x))
    low, high = range_of_input(graph)
    expected = float(((x < low) | (x > high)).double().mean())
    found = dict(graph.manifest.facts["saturated_ranges"])  # type: ignore[arg-type]
    assert found.get("input image", 0) == pytest.approx(expected, abs=2e-4)
    if observer == "percentile":
        assert expected == pytest.approx(0.05, abs=0.01)


def test_16_bits_that_span_all_values_saturate_none(tmp_path: Path) -> None:
    x = images().clamp(-1, 1)  # many values lie at the very ends
    model = model_of(tmp_path / "source", "mlp", IMAGE)
    stage = QuantizeStatic(observer="mse", activation_bits=16, calibration_samples=64)
    facts = stage(model, context_of(tmp_path / "int8", x)).manifest.facts
    assert facts["saturated_ranges"] == {}


def test_the_worst_five_ranges_are_named(tmp_path: Path) -> None:
    model = model_of(tmp_path / "source", "mobilenet", IMAGE)
    stage = QuantizeStatic(observer="percentile", percentile=80, calibration_samples=64)
    graph = stage(model, context_of(tmp_path / "int8", images()))
    found = dict(graph.manifest.facts["saturated_ranges"])  # type: ignore[arg-type]
    assert len(found) == 5
    assert {"input image", "stem.0"} <= found.keys()
    assert min(found.values()) > 0.05


def test_channels_and_layers_that_never_change_are_named(tmp_path: Path) -> None:
    dead = {"stem__1__bias": -100.0, "pointwise__1__weight": 0.0, "pointwise__1__bias": 0.5}
    model = model_of(tmp_path / "source", "mobilenet", IMAGE, **dead)
    stage = QuantizeStatic(calibration_samples=64)
    graph = stage(model, context_of(tmp_path / "int8", images()))
    assert graph.manifest.facts["dead_ranges"] == {
        "stem.0": "1 of 16 channels never change",
        "depthwise.0": "1 of 16 channels never change",
        "pointwise.0": "1 of 32 channels never change",
    }


def test_a_layer_that_is_dead_as_a_whole_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = Recipe(factory="networks:mlp")
    state = recipe.build(NETWORKS).state_dict()
    state["1.bias"] -= 100
    model = EagerModel.create(tmp_path / "source", recipe, state, IMAGE, folder=NETWORKS)
    graph = QuantizeStatic(calibration_samples=64)(model, context_of(tmp_path / "int8", images()))
    found = dict(graph.manifest.facts["dead_ranges"])  # type: ignore[arg-type]
    assert found["1"] == "always 0"


def test_equal_samples_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path / "source", "mlp", IMAGE)
    context = context_of(tmp_path / "none", images(1).repeat(64, 1, 1, 1))
    with pytest.raises(StageFailed, match="all 48 samples are equal, expected samples that vary"):
        QuantizeStatic(calibration_samples=48)(model, context)
    assert not (tmp_path / "none").exists()


def test_one_sample_that_differs_is_enough(tmp_path: Path) -> None:
    model = model_of(tmp_path / "source", "mlp", IMAGE)
    x = images(1).repeat(64, 1, 1, 1)
    x[40, 0, 0, 0] += 1
    QuantizeStatic(calibration_samples=64)(model, context_of(tmp_path / "int8", x))


def test_a_constant_input_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of(tmp_path / "source", "two_inputs", TWO_INPUTS)
    context = context_of(tmp_path / "none", images(), torch.full((64, 4), 0.25))
    with pytest.raises(StageFailed, match=r"input context is 0\.25 in every sample"):
        QuantizeStatic(calibration_samples=64)(model, context)


def test_a_constant_input_that_stays_float_is_taken(tmp_path: Path) -> None:
    model = model_of(tmp_path / "source", "two_inputs", TWO_INPUTS)
    context = context_of(tmp_path / "int8", images(), torch.full((64, 4), 0.25))
    QuantizeStatic(calibration_samples=64, exclude=("context",))(model, context)


def test_fewer_than_sixteen_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 16"):
        QuantizeStatic(calibration_samples=15)


def test_a_percentile_for_another_observer_is_refused() -> None:
    with pytest.raises(ValueError, match="percentile is for observer: percentile, found mse"):
        QuantizeStatic(observer="mse", percentile=99.9)


def test_a_sample_is_the_same_each_time_it_is_read() -> None:
    x = torch.randn(64, 4)
    data = Splits({"train": TensorDataset(x, x[:, 0])}, batch_size=32)
    calibration = CalibrationData(data, 48, seed=0)
    first, again = ([batch.inputs[0] for batch in calibration] for _ in range(2))
    assert [len(part) for part in first] == [32, 16]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_large_samples_are_calibrated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.splits.CALLED_BYTES", 8 * 4 * 4)  # eight rows of 4 floats
    x = torch.randn(64, 4)
    data = Splits({"train": TensorDataset(x, x[:, 0])}, batch_size=32)
    parts, whole = (
        [batch.inputs[0] for batch in CalibrationData(data, 48, 0, has_any_rows)]
        for has_any_rows in (True, False)
    )
    assert [len(part) for part in parts] == [8] * 6
    assert [len(part) for part in whole] == [32, 16]  # as a model of one batch size takes them
    assert torch.equal(torch.cat(parts), torch.cat(whole))


def test_a_fixed_batch_of_large_samples_is_calibrated_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.data.splits.CALLED_BYTES", 4 * 64)  # one image
    fixed = Signature(inputs=(TensorSpec(name="image", shape=(16, 1, 8, 8)),))
    model = build_model(tmp_path / "source", "networks:mlp", fixed)
    context = Context(root=tmp_path / "int8", data=labelled_images())
    QuantizeStatic(calibration_samples=32)(model, context)
