"""Causes of a pruned model's loss are named where they were put in, the guilty part first."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compress import Context
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.diagnosis.cause import RefusedStage
from compress.core.metrics import Metric
from compress.data.batch import Batch
from compress.data.splits import Splits
from compress.pruning.diagnosis.causes import CAUSES
from compress.pruning.diagnosis.diagnosis import CutChannels, ZeroedWeights
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_weights import PruneWeights
from compress.pruning.recovery.recovery import reestimate_batch_norms_
from tests.compress.pruning.diagnosis.digit_nets import data, net

HERE = Path(__file__).parent
IMAGES = Signature(inputs=(TensorSpec(name="x", shape=("batch", 1, 8, 8)),))


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    model = net()
    x, y = data()["train"].tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(8):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def diagnosed(module: nn.Module, folder: Path, stage: Any, calibration: float = 0.0):
    """Return a refused stage with the guilty parts, and the causes above their thresholds."""
    recipe = Recipe(factory="digit_nets:net")
    state = module.state_dict()
    model = EagerModel.create(folder / "model", recipe, state, IMAGES, folder=HERE)
    context = Context(folder / "made", Splits(data(calibration), 64), metric=Metric("accuracy"))
    after = stage.run_checked(model, context)
    kind = CutChannels if isinstance(stage, PruneChannels) else ZeroedWeights
    measured = kind(stage, model, after, context, 1.0)
    lost = context.score(model) - context.score(after)
    assert lost > 0.05, "the fault costs something"
    guilty = measured.search.guilty()
    measured.spread = not guilty
    parts = guilty or measured.search.widest()
    refused = RefusedStage(stage, model, after, context, parts, measured, 1.0)
    found = {}
    for cause in (cause for cause in CAUSES if stage.stage in cause.stages):
        values = [cause.measure(refused, part) for part in (*parts, "")]
        if any(value is not None and value > cause.limit for value in values):
            returned = cause.recovered_share(refused, parts)
            found |= {cause.key: (cause, returned)} if returned and returned >= 0.1 else {}
    ranked = [cause for cause, _ in sorted(found.values(), key=lambda pair: -pair[1])]
    return refused, ranked


@pytest.mark.slow
def test_a_group_that_is_too_narrow_is_named_with_what_widens_it(module, tmp_path) -> None:
    stage = PruneChannels(widths={"3": 1}, round_to=1)
    refused, causes = diagnosed(module, tmp_path, stage)
    assert refused.layers == ("3",)
    assert causes[0].key == "group_too_narrow"
    settings = [repair.settings for repair in causes[0].repairs(refused, ("3",))]
    assert settings[0] == {"widths": {"3": 9}}
    assert settings[-1] == {"finetune": {"epochs": 4}}, "training comes last"


@pytest.mark.slow
def test_a_missing_refit_is_named_before_what_it_would_return(module, tmp_path) -> None:
    stage = PruneChannels(ratio=0.5, refit=False, round_to=1)
    refused, causes = diagnosed(module, tmp_path, stage)
    assert causes[0].key == "no_refit"
    (refit, *_) = causes[0].repairs(refused, refused.layers)
    assert refit.settings == {"refit": True} and not refit.trains


@pytest.mark.slow
def test_a_sample_in_other_units_is_named(module, tmp_path) -> None:
    stage = PruneChannels(ratio=0.5, round_to=1)
    refused, causes = diagnosed(module, tmp_path, stage, calibration=8.0)
    assert causes[0].key == "calibration_unlike_val"
    assert refused.measured.sample_unlikeness == pytest.approx(8, rel=0.1)


def test_statistics_from_before_the_cut_are_stale(module, tmp_path) -> None:
    shifted = copy.deepcopy(module)
    with torch.no_grad():  # channels that are constant, and read by the next layer
        shifted[1].weight[:2], shifted[1].bias[:2] = 0, 2.0
        signs = torch.randn(16, generator=torch.Generator().manual_seed(0)).sign()
        shifted[3].weight[:, :2] = 0.3 * signs[:, None, None, None]
    reestimate_batch_norms_(shifted, [Batch((data()["train"].tensors[0],), None)])
    stage = PruneChannels(widths={"0": 14}, importance="bn_scale", calibration_samples=0)
    refused, causes = diagnosed(shifted.eval(), tmp_path, stage)
    assert causes[0].key == "stale_batch_norm"
    assert causes[0].measure(refused, "") > 1
    settings = [repair.settings for repair in causes[0].repairs(refused, ())]
    assert {"calibration_samples": None, "refit": False} in settings


def test_a_layer_with_too_many_zeros_is_named(module, tmp_path) -> None:
    stage = PruneWeights(amount=0.97, include=("3",))
    refused, causes = diagnosed(module, tmp_path, stage)
    assert refused.layers == ("3.weight",)
    assert "layer_too_sparse" in [cause.key for cause in causes]
    layer = next(cause for cause in causes if cause.key == "layer_too_sparse")
    assert layer.measure(refused, "3.weight") == pytest.approx(0.97, abs=0.01)


def test_a_stage_is_pruned_again_on_as_many_samples_as_it_was(tmp_path) -> None:
    torch.manual_seed(0)
    state = net().state_dict()
    recipe = Recipe(factory="digit_nets:net")
    model = EagerModel.create(tmp_path / "model", recipe, state, IMAGES, folder=HERE)
    context = Context(tmp_path / "made", Splits(data(0.0), 64), metric=Metric("accuracy"))
    stage = PruneWeights(method="sparsegpt", amount=0.5, calibration_samples=16)
    after = stage.run_checked(model, context)
    measured = ZeroedWeights(stage, model, after, context, 1.0)
    again, made = measured.changed_module(measured.own).state_dict(), after.load().state_dict()
    assert all(torch.equal(again[name], made[name]) for name in made)


def test_statistics_are_compared_after_a_cut_that_is_ranked_by_gradients(tmp_path) -> None:
    torch.manual_seed(0)
    recipe = Recipe(factory="digit_nets:net")
    model = EagerModel.create(tmp_path / "m", recipe, net().state_dict(), IMAGES, folder=HERE)
    context = Context(tmp_path / "made", Splits(data(0.0), 64), metric=Metric("accuracy"))
    stage = PruneChannels(ratio=0.5, importance="taylor", calibration_samples=16)
    after = stage.run_checked(model, context)
    assert CutChannels(stage, model, after, context, 1.0).statistics_shift() > 0


def test_fewer_zeros_are_no_repair_where_a_pattern_says_how_many() -> None:
    (cause,) = [cause for cause in CAUSES if cause.key == "amount_too_high"]
    stages = [PruneWeights(pattern="2:4"), PruneWeights(amount=0.8)]
    refused = [RefusedStage(stage, None, None, None, (), None, 0.0) for stage in stages]
    of_pattern, of_amount = ([r.settings for r in cause.repairs(one, ())] for one in refused)
    assert of_pattern == [{"finetune": {"epochs": 4}}]
    assert of_amount[1:3] == [{"amount": 0.6}, {"amount": 0.4}]


def test_statistics_are_re_estimated_after_zeros(module, tmp_path) -> None:
    recipe = Recipe(factory="digit_nets:net")
    model = EagerModel.create(tmp_path / "m", recipe, module.state_dict(), IMAGES, folder=HERE)
    scores = {}
    for how in ("keep", "reestimate"):
        stage = PruneWeights(amount=0.7, batch_norm=how)
        context = Context(tmp_path / how, Splits(data(), 64), metric=Metric("accuracy"))
        scores[how] = context.score(stage.run_checked(model, context))
    assert scores["reestimate"] > scores["keep"] + 0.1
