"""The metric on `val` is computed batch by batch, and equals that of all samples at once."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from compress.core.metrics import Metric
from compress.training.distributed.base import Strategy
from compress.training.loop.trainer import evaluate
from tests.compress.training.builders import load_data
from tests.compress.training.loop.metrics_on_ranks import CASES, job
from tests.compress.training.nets import plain

F1 = Metric("torchmetrics.classification.MulticlassF1Score", (("num_classes", 3),))


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
        value = evaluate(job(metric, data), net, Strategy())
    assert value == pytest.approx(expected, rel=1e-9 if metric != F1 else 1e-6)


def test_r2_adds_up():
    net, data = plain().eval(), load_data("numbers", batch_size=7)
    metric = Metric("r2")
    with torch.no_grad():
        expected = metric.score(*whole(net, data))
    value = evaluate(job(metric, data), net, Strategy())
    assert value == pytest.approx(expected, rel=1e-13)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory, launch):
    file = tmp_path_factory.mktemp("metrics") / "values.json"
    launch(Path(__file__).with_name("metrics_on_ranks.py"), 3, file)
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CASES)
def test_three_ranks_measure_what_one_process_does(on_ranks, name: str):
    together, alone = on_ranks["together"][name], on_ranks["alone"][name]
    # Forwards of other batch sizes round differently.
    assert together == (alone if "accuracy" in name else pytest.approx(alone, rel=1e-6))
