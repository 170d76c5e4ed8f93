"""Strategy `dp`: DataParallel over several CUDA devices, and one process elsewhere."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.training import fit as fit_module
from compress.training.config.training import Training
from compress.training.distributed.base import (
    DataParallelStrategy,
    check_replicable,
    visible_devices,
)
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data

DP = {"parallel": {"strategy": "dp"}}


def train(root: Path, device="cpu", net="nets:blocks", **settings):
    source = import_net(root / "source", net)
    training = Training(epochs=2, batch_size=16, learning_rate=0.01, **settings)
    metric = Metric("accuracy")
    where = Context(root=root, data=load_data("uneven"), metric=metric, device=device)
    return fit(source, training, TargetLoss(), where, "train")


def largest_difference(a, b):
    one, other = a.module.state_dict(), b.module.state_dict()
    return max(float((one[name].cpu() - other[name].cpu()).abs().max()) for name in one)


def test_without_several_devices_it_is_one_process_and_says_why(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path / "dp", parallel={"strategy": "dp", "processes": 4})
    assert "runs on cpu alone" in caplog.text and "the result is the same" in caplog.text
    assert largest_difference(result, train(tmp_path / "one")) == 0


def test_data_parallel_itself_gives_the_weights_of_one_process(tmp_path, monkeypatch, caplog):
    called, forward = [], nn.DataParallel.forward

    def counted(self, *inputs):
        called.append(len(inputs[0]))
        return forward(self, *inputs)

    # Without a CUDA device, nn.DataParallel takes any ids and calls the module itself.
    monkeypatch.setattr(nn.DataParallel, "forward", counted)
    monkeypatch.setattr(fit_module, "visible_devices", lambda device: [0, 1])
    result = train(tmp_path / "dp", **DP, accumulate=2)
    assert set(called) == {8}
    assert "to 2 devices in each step" in caplog.text
    monkeypatch.undo()
    assert largest_difference(result, train(tmp_path / "one", accumulate=2)) == 0


def test_the_given_device_comes_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert visible_devices("cuda") == visible_devices("cuda:0") == [0, 1, 2]
    assert visible_devices("cuda:1") == [1, 0, 2]
    assert visible_devices("cpu") == []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"compile": "whole"}, "compile: whole"),
        ({"activation_checkpointing": "full"}, "activation_checkpointing: full"),
        ({"precision": "bf16"}, "precision: bf16"),
    ],
)
def test_what_threads_would_compute_wrongly_is_refused(settings, name):
    training = Training(epochs=1, **DP, **settings)
    check_replicable(training, 1)
    with pytest.raises(StageFailed, match=f"over 2 devices does not go with {name}; use .* ddp"):
        check_replicable(training, 2)


def test_losses_that_read_modules_are_refused():
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda *_: None)
    with pytest.raises(StageFailed, match="losses that read a module's outputs"):
        DataParallelStrategy([0, 1]).wrap(net, Training(epochs=1, **DP), lambda: None)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip_norm": 1.0}])
def test_two_devices_give_the_weights_of_one(tmp_path, settings):
    together = train(tmp_path / "dp", "cuda:0", **DP, **settings)
    alone = train(tmp_path / "one", "cuda:0", **settings)
    assert largest_difference(together, alone) < 1e-5
