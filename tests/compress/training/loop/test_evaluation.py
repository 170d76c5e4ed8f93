"""The metric on `val` is computed batch by batch, and equals that of all samples at once."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from compress.core.metrics import Metric
from compress.training.config.training import Training
from compress.training.distributed.base import SingleProcess
from compress.training.loop.evaluation import evaluate
from tests.compress.training.builders import load_data
from tests.compress.training.nets import plain

F1 = Metric("torchmetrics.classification.MulticlassF1Score", (("num_classes", 3),))


def job(metric: Metric, data):
    training = Training(epochs=1)
    return SimpleNamespace(
        data=data, metric=metric, device="cpu", reference=None, training=training
    )


def whole(net, data):
    """Return all outputs of a network on `val`, and the targets."""
    pairs = [(net(*batch.inputs), batch.target) for batch in data.batches("val")]
    return map(torch.cat, zip(*pairs, strict=True))


@pytest.mark.parametrize("metric", [Metric(), Metric("loss"), F1], ids=lambda m: m.name)
def test_batches_add_up_and_their_outputs_are_not_kept(metric: Metric):
    net, data = plain().eval(), load_data(batch_size=7)
    metric = metric.with_inferred_loss(data)
    with torch.no_grad():
        expected = metric.score(*whole(net, data))
    with patch("torch.cat", side_effect=AssertionError("outputs are kept")):
        value = evaluate(job(metric, data), net, SingleProcess())
    assert value == pytest.approx(expected, rel=1e-9 if metric != F1 else 1e-6)


def test_r2_adds_up():
    net, data = plain().eval(), load_data("numbers", batch_size=7)
    metric = Metric("r2")
    with torch.no_grad():
        expected = metric.score(*whole(net, data))
    value = evaluate(job(metric, data), net, SingleProcess())
    assert value == pytest.approx(expected, rel=1e-13)
