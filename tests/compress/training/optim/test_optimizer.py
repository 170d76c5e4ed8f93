import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.training.config.training import Training
from compress.training.optim.optimizer import build_optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_vectors_are_not_decayed(optimizer):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    matrices, vectors = build_optimizer(net, Training(epochs=1, optimizer=optimizer)).param_groups
    assert [p.ndim for p in matrices["params"]] == [2] and matrices["weight_decay"] > 0
    assert [p.ndim for p in vectors["params"]] == [1, 1, 1] and vectors["weight_decay"] == 0


def test_a_frozen_model_is_refused():
    with pytest.raises(StageFailed, match="nothing to train"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), Training(epochs=1))


def test_sgd_takes_its_momentum():
    training = Training(epochs=1, momentum=0.5, nesterov=False)
    optimizer = build_optimizer(nn.Linear(2, 2), training)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (0.5, False)
