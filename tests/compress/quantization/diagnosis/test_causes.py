"""Each cause of a model of `quantize_static` is above its threshold where it was put in."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from compress import Context, QuantizeDynamic, QuantizeStatic, Splits
from compress.artifacts.eager_model import EagerModel
from compress.core.diagnosis.cause import RefusedStage, Repair
from compress.quantization.diagnosis.causes import STATIC_CAUSES
from compress.quantization.diagnosis.diagnosis import (
    QuantizationDiagnosis,
    RequantizationDiagnosis,
)
from tests.compress.quantization.builders import build_model, images


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    return build_model(tmp_path_factory.mktemp("model") / "model", "networks:mlp")


def diagnosed(model: EagerModel, folder: Path, calibration: torch.Tensor, **settings):
    """Return a stage whose calibration sample is another one, and what was measured of it."""
    with model.open() as predict:
        labels = [predict(images(64))[0].argmax(1), predict(calibration)[0].argmax(1)]
    data = Splits(
        {
            "val": TensorDataset(images(64), labels[0]),
            "calibration": TensorDataset(calibration, labels[1]),
        },
        32,
    )
    stage = QuantizeStatic(**settings)
    context = Context(root=folder / "x", data=data)
    measured = QuantizationDiagnosis(stage, model, model, context, 0.0)
    layers = measured.switched.layers
    return RefusedStage(stage, model, model, context, layers, measured, 0.0)


def above(refused: RefusedStage) -> set[str]:
    """Return the causes that are above their threshold in the first layer."""
    first = refused.layers[0]
    values = {cause.key: cause.measure(refused, first) for cause in STATIC_CAUSES}
    limits = {cause.key: cause.limit for cause in STATIC_CAUSES}
    return {key for key, value in values.items() if value is not None and value > limits[key]}


def test_a_sample_like_val_has_no_cause(model: EagerModel, tmp_path: Path) -> None:
    assert above(diagnosed(model, tmp_path, images(64))) == set()


def test_a_sample_that_is_too_dark_is_too_narrow(model: EagerModel, tmp_path: Path) -> None:
    assert above(diagnosed(model, tmp_path, images(64) * 0.2)) == {"sample_too_narrow"}


def test_a_sample_in_other_units_is_too_wide(model: EagerModel, tmp_path: Path) -> None:
    assert above(diagnosed(model, tmp_path, images(64) * 16)) == {"sample_too_wide"}


def test_few_large_values_of_the_sample_are_outliers(model: EagerModel, tmp_path: Path) -> None:
    calibration = images(64).clone()
    calibration[0, 0, 0, 0] = 500.0
    assert above(diagnosed(model, tmp_path, calibration)) == {"outliers"}


def test_a_range_that_the_observer_cuts_off(model: EagerModel, tmp_path: Path) -> None:
    cut = {"observer": "percentile", "percentile": 70.0}
    refused = diagnosed(model, tmp_path, images(64), **cut)
    assert above(refused) == {"range_cut_off"}
    (cause,) = [cause for cause in STATIC_CAUSES if cause.key == "range_cut_off"]
    repairs = cause.repairs(refused, refused.layers[:1])
    assert repairs[0] == Repair({"observer": "minmax", "percentile": None}, 0)
    assert [repair.cost for repair in repairs] == sorted(repair.cost for repair in repairs)
    assert all("points" not in repair.settings for repair in repairs)
    assert repairs[-1].trains and not repairs[0].trains


def test_two_repairs_are_joined_unless_they_set_the_same() -> None:
    one, other = Repair({"equalize": True}, 0), Repair({"activation_bits": 16}, 3)
    assert one.joined(other) == Repair({"equalize": True, "activation_bits": 16}, 3)
    assert one.joined(Repair({"equalize": False, "smooth": "auto"}, 1)) is None
    assert one.joined(Repair({"stage": "quantize_mixed"}, 3)) is None


class Checkpointing(QuantizeDynamic):
    """A stage that leaves a checkpoint, as one that streams weights does."""

    def run(self, model: EagerModel, context: Context):
        (context.work / "checkpoint").touch()
        return super().run(model, context)


def test_a_stage_that_is_run_again_leaves_nothing_behind(model: EagerModel, tmp_path: Path) -> None:
    with model.open() as predict:
        labels = predict(images(64))[0].argmax(1)
    data = Splits({"val": TensorDataset(images(64), labels)}, 32)
    root, scratch = tmp_path / "int8", tmp_path / "work"
    context = Context(root=root, data=data, scratch=scratch)
    stage = Checkpointing()
    measured = RequantizationDiagnosis(stage, model, stage(model, context), context, 0.0)
    assert measured.search.lost is not None
    measured.drop_with({"activation_range": "row"})
    assert measured.evaluations > 1
    assert [*tmp_path.iterdir()] == [root]


def test_a_stage_with_other_settings_has_no_gates_and_defaults_for_none() -> None:
    gates = ({"gate": "max_drop", "points": 1},)
    stage = QuantizeStatic(name="int8", observer="percentile", percentile=99.9, gates=gates)
    changed = stage.with_settings({"observer": "mse", "percentile": None})
    assert changed == QuantizeStatic(name="int8", observer="mse")
