import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.training.config.training import Training
from compress.training.optim.optimizer import build_optimizer, learning_rate


def rates(**settings):
    training = Training(epochs=1, learning_rate=1.0, **settings)
    return [learning_rate(training, step, 100) for step in range(100)]


def test_onecycle_rises_to_the_peak_and_falls_almost_to_zero():
    values = rates(schedule="onecycle")
    assert values[0] == pytest.approx(1 / 25)
    assert values.index(max(values)) == 30 and max(values) == pytest.approx(1.0)
    assert values[:31] == sorted(values[:31]) and values[30:] == sorted(values[30:], reverse=True)
    assert 0 < values[-1] < 0.01


def test_cosine_falls_and_constant_stays():
    assert rates(schedule="cosine") == sorted(rates(schedule="cosine"), reverse=True)
    assert rates(schedule="cosine")[50] == pytest.approx(0.5)
    assert set(rates(schedule="constant")) == {1.0}


def test_a_rate_warms_up_and_falls_in_steps():
    assert rates(schedule="constant", warmup=0.1)[:11] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0]
    )
    warm = rates(schedule="cosine", warmup=0.5)
    assert warm.index(max(warm)) in (49, 50) and max(warm) == pytest.approx(1.0)
    training = Training(epochs=6, learning_rate=1.0, schedule="step", schedule_factor=0.5)
    assert [learning_rate(training, 10 * epoch, 60) for epoch in range(6)] == [
        1, 1, 0.5, 0.5, 0.25, 0.25
    ]  # fmt: skip
    plateau = Training(epochs=6, learning_rate=1.0, schedule="plateau")
    assert learning_rate(plateau, 5, 60, plateaus=2) == pytest.approx(0.01)


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
