"""Steps in fp16, whose scaled loss is emulated here on the CPU: steps that overflow are skipped."""

import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.data.batch import Batch
from compress.data.splits import Splits
from compress.training import fit as fitting
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy
from compress.training.loop.train_state import TrainState
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data

TOO_LARGE = 1e6
"""Above 65,504, the largest number in fp16."""


def fp16_state(**settings) -> TrainState:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    training = Training(
        epochs=1, batch_size=8, precision="fp16", ema_decay=0.9, learning_rate=0.05, **settings
    )

    def loss(outputs, batch):
        return nn.functional.mse_loss(outputs[0].float(), batch.target)

    example = Batch((torch.zeros(2, 4),), torch.zeros(2, 1))
    return TrainState(module, loss, training, Strategy(), "cpu", lambda: example)


def batches(scale: float = 1.0) -> list[Batch]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return [Batch((part * scale,), part[:, :1]) for part in x.chunk(2)]


@pytest.mark.parametrize("settings", [{}, {"on_nan": "skip"}, {"clip_norm": 1.0}])
def test_a_step_that_overflows_in_fp16_is_skipped_and_lowers_the_loss_scale(settings):
    state = fp16_state(**settings)
    state.module.train()
    first = state.train_step(batches(), 0)
    before = {name: value.clone() for name, value in state.module.state_dict().items()}
    assert not torch.isfinite(torch.tensor(state.train_step(batches(TOO_LARGE), 1)))
    after = state.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert state.scaler.get_scale() == state.loss_scale / 2
    for step in range(2, 12):
        last = state.train_step(batches(), step)
    assert last < first / 2


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_training_that_overflows_at_every_loss_scale_stops(tmp_path, monkeypatch, on_nan):
    monkeypatch.setattr(fitting, "refuse_unmet", lambda *_: None)  # fp16 on the CPU
    data = load_data(batch_size=128)
    x, y = data.split("train").tensors
    large = torch.utils.data.TensorDataset(torch.full_like(x, TOO_LARGE), y)
    where = Context(root=tmp_path, data=Splits({**data.datasets, "train": large}))
    training = Training(epochs=1, batch_size=2, precision="fp16", on_nan=on_nan, keep="last")
    expected = "fp16 overflows even where the loss is not scaled up; use precision: bf16"
    with pytest.raises(StageFailed, match=expected):
        fitting.fit(import_net(tmp_path / "net"), training, TargetLoss(), where, "train")
