"""Training with channels last: the results of the default layout but for rounding, and resumed."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint.safetensors_io import read_safetensors
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import DataReference
from compress.training.config.training import Training
from compress.training.stage import Train

HERE = Path(__file__).parent
COMMON = {"data": "nets:images", "ema_decay": 0.9}
LAST = {**COMMON, "channels_last": True}
ALONE = {"alone": COMMON, "alone-last": LAST}
TOGETHER = {
    "ddp-last": LAST,
    "zero1-last": {**LAST, "parallel": {"strategy": "zero1", "communication": "int8"}},
    "ddp-copies": {**LAST, "parallel": {"gradient_as_bucket_view": False}},
    "halves/ddp-last": LAST,
    "halves/zero1-last": {**LAST, "parallel": {"strategy": "zero1", "communication": "int8"}},
}
TOLERANCE = 1e-5
"""As in test_strategies.py; other kernels add up in another order."""


def import_images(path: Path):
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 3, 6, 6)),))
    recipe = Recipe(factory="nets:Images")
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=HERE)


@pytest.fixture(scope="module")
def results(tmp_path_factory, trained, launch):
    root = tmp_path_factory.mktemp("channels")
    torch.manual_seed(0)
    import_images(root / "source")
    launch(HERE / "train_on_ranks.py", 2, root, json.dumps(ALONE), json.dumps(TOGETHER))
    return {name: trained(root / name) for name in (*ALONE, *TOGETHER)}


def largest_difference(one, other) -> float:
    names = one.weights.keys() - {"has_channels_last"}
    assert names <= other.weights.keys()
    return max(float((one.weights[n] - other.weights[n]).abs().max()) for n in names)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["alone-last", "ddp-last", "ddp-copies"])
def test_only_rounding_differs(results, name) -> None:
    assert results["alone"].weights["has_channels_last"] == 0
    assert results[name].weights["has_channels_last"] == 1
    assert largest_difference(results["alone"], results[name]) < TOLERANCE


@pytest.mark.multiprocess
def test_gradients_in_buckets_and_copied_ones_give_the_same_bits(results) -> None:
    assert largest_difference(results["ddp-last"], results["ddp-copies"]) == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["ddp-last", "zero1-last"])
def test_a_resumed_training_ends_with_the_same_bits(results, name) -> None:
    assert largest_difference(results[name], results[f"halves/{name}"]) == 0
    assert results[name].history == results[f"halves/{name}"].history


def test_the_stage_writes_an_artifact_in_the_default_layout(tmp_path) -> None:
    data = DataReference("nets:images", {}, HERE, 16).load()
    where = Context(root=tmp_path / "out", data=data)
    stage = Train(epochs=1, batch_size=16, channels_last=True)
    trained = stage(import_images(tmp_path / "source"), where)
    weights = read_safetensors(trained.payload_path)
    assert weights["first.weight"].read().is_contiguous()
    assert trained.load()(torch.randn(2, 3, 6, 6)).shape == (2, 3)


@pytest.mark.parametrize(
    "parallel", [{"strategy": "fsdp"}, {"tensor": 2}, {"pipeline": {"microbatches": 2}}]
)
def test_strategies_that_rearrange_weights_are_refused(parallel) -> None:
    with pytest.raises(ValidationError, match="channels_last is for strategy: ddp, zero1 or dp"):
        Training(epochs=1, channels_last=True, parallel={"processes": 2, **parallel})


def test_the_default_changes_no_cache_key() -> None:
    settings = Training(epochs=1).model_dump(mode="json")
    assert "channels_last" not in settings and "int8_rounding" not in settings["parallel"]
