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


def test_muon_steps_matrices_and_adamw_the_rest():
    def net():
        torch.manual_seed(0)
        layers = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 2, 1)
        return nn.Sequential(*layers)

    ours, alone = net(), net()
    training = Training(epochs=1, optimizer="Muon", optimizer_arguments={"betas": [0.8, 0.9]})
    optimizer = build_optimizer(ours, training)
    table, matrix, kernel = (part.weight for part in (alone[0], alone[1], alone[3]))
    vectors = [alone[1].bias, alone[3].bias]
    rate, decay = {"lr": 2e-3}, {"weight_decay": 0.05}
    expected = [
        torch.optim.Muon([matrix], **rate, **decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([table, kernel], **rate, **decay, betas=(0.8, 0.9)),
        torch.optim.AdamW(vectors, **rate, weight_decay=0, betas=(0.8, 0.9)),
    ]
    for step in range(4):
        if step == 2:  # as a resumed training does
            state = optimizer.state_dict()
            optimizer = build_optimizer(ours, training)
            optimizer.load_state_dict(state)
        for model, steps in ((ours, [optimizer]), (alone, expected)):
            for each in steps:
                each.zero_grad()
            model(torch.tensor([step, 5])).square().sum().backward()
            for each in steps:
                each.step()
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    assert all(torch.equal(found, wanted) for found, wanted in pairs)


def test_what_muon_cannot_do_is_refused():
    with pytest.raises(StageFailed, match="muon is for matrices, and"):
        build_optimizer(nn.Conv1d(2, 2, 1), Training(epochs=1, optimizer="muon"))
    wrong = Training(epochs=1, optimizer="muon", optimizer_arguments={"dampening": 1})
    with pytest.raises(StageFailed, match=r"muon refuses .*unexpected dampening"):
        build_optimizer(nn.Linear(2, 2), wrong)
