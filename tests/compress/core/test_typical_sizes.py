"""Multiply-accumulates are counted at the sizes of a median sample of `val`."""

from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.artifact import Artifact, Step
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits

TEXTS = Signature(inputs=(TensorSpec(name="x", shape=("batch", "length", 4)),))
LENGTHS = (3, 20, 5, 5, 30)


@pytest.fixture
def model(tmp_path: Path) -> EagerModel:
    recipe = Recipe(factory="torch.nn:Linear", arguments={"in_features": 4, "out_features": 3})
    weights = nn.Linear(4, 3).state_dict()
    return EagerModel.create(tmp_path / "model", recipe, weights, TEXTS)


def test_typical_sizes_are_those_of_a_sample_of_median_size(tmp_path: Path) -> None:
    data = Splits({"val": [torch.zeros(length, 4) for length in LENGTHS]})
    assert Context(tmp_path, data).typical_sizes(TEXTS) == {"length": 5}
    assert Context(tmp_path).typical_sizes(TEXTS) == {}
    fixed = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    assert Context(tmp_path, data).typical_sizes(fixed) == {}


def test_macs_are_counted_at_these_sizes(tmp_path: Path, model: EagerModel) -> None:
    context = Context(tmp_path / "result", artifacts={"source": model})
    assert context.macs(model, {"length": 5}) == 5 * 4 * 3
    assert context.macs(model, {}) == model.macs() == 8 * 4 * 3


def test_a_format_without_operators_has_the_macs_of_what_it_was_made_of(
    tmp_path: Path, model: EagerModel
) -> None:
    class Packed(EagerModel):
        macs = Artifact.macs

    step = Step(stage="pack", settings={}, inputs={"input": model.digest})
    manifest = model.manifest.model_copy(update={"facts": {"macs": 96}, "lineage": (step,)})
    packed = Packed(model.path, manifest, "digest")
    context = Context(tmp_path / "result", artifacts={"source": model})
    assert context.macs(packed, {"length": 5}) == 5 * 4 * 3
    assert context.macs(packed, {}) == 96
    assert Context(tmp_path / "result").macs(packed, {"length": 5}) is None
