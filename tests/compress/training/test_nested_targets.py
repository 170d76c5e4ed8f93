"""Losses and metrics of several outputs, with targets of different lengths."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.loss import Loss
from compress.core.metrics import Metric
from compress.data.loader_config import Loading
from compress.data.splits import DataReference
from compress.distillation.stage import Distill
from compress.pruning.prune_channels import PruneChannels
from compress.training.stage import Train

HERE = Path(__file__).parent
LARGEST_ERROR = Metric("detectors:largest_error", direction=False, folder=HERE)


@pytest.fixture
def detector(tmp_path):
    signature = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))
    recipe = Recipe(factory="detectors:Detector")
    return import_checkpoint(tmp_path / "source", recipe, signature, checkpoint=None, folder=HERE)


def context(root, metric=LARGEST_ERROR, loss="detectors:loss", **loading):
    data = DataReference("detectors:data", {}, HERE, 16, Loading(**loading)).load()
    return Context(root=root, data=data, loss=Loss(loss, folder=HERE), metric=metric)


def trained(detector, where, **settings):
    settings = {"epochs": 2, "batch_size": 16, "learning_rate": 0.01, "keep": "last", **settings}
    return Train(optimizer="adamw", **settings)(detector, where)


@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_two_processes_train_and_measure_as_one(tmp_path, detector):
    one = trained(detector, context(tmp_path / "one"))
    two = trained(detector, context(tmp_path / "two"), parallel={"processes": 2})
    a, b = one.load().state_dict(), two.load().state_dict()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-5
    first, second = (x.manifest.facts["history"] for x in (one, two))
    assert [e["metric"] for e in second] == pytest.approx([e["metric"] for e in first], rel=1e-4)


@pytest.mark.slow
def test_a_detector_learns_is_pruned_and_taught(tmp_path, detector):
    where = context(tmp_path / "train", Metric("map"))
    learned = trained(detector, where, epochs=40)
    assert where.score(detector) < 0.1
    assert where.score(learned) > 0.5
    where = context(tmp_path / "prune", Metric("loss"))
    prune = PruneChannels(ratio=0.5, importance="taylor", calibration_samples=32)
    pruned = prune(learned, where)
    assert where.score(learned) < where.score(pruned) < where.score(detector)
    where = context(tmp_path / "distill", Metric("loss"))
    distill = Distill(
        teacher="learned",
        losses=[{"loss": "mse", "weight": 0.1}, {"loss": "labels"}],
        epochs=3,
        batch_size=16,
        optimizer="adamw",
        learning_rate=0.01,
    )
    where = replace(where, artifacts={"learned": learned})
    assert where.score(distill(detector, where)) < 0.8 * where.score(detector)


def test_a_built_in_loss_names_what_takes_such_targets(tmp_path, detector):
    where = context(tmp_path / "train", loss="cross_entropy")
    with pytest.raises(
        StageFailed,
        match=r"loss cross_entropy takes targets that are one tensor, found a list of "
        r"\[\{boxes: float32 \[\d, 4\], labels: int64 \[\d\]\}, …\]; write loss: module:callable",
    ):
        trained(detector, where)


def test_a_metric_that_fails_shows_what_it_was_called_with():
    with pytest.raises(
        StageFailed,
        match=r"metric 'detectors:loss' fails for outputs float32 \[n, 3, 3\] and targets "
        r"a list of \[\{boxes: .*: IndexError: too many",
    ):
        Metric("detectors:loss", folder=HERE).score(
            torch.zeros(2, 3, 3), [{"boxes": torch.zeros(1, 4)}, None]
        )
