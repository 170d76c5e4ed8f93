"""`precision: bf16-true`: weights and optimizer state in bf16, rounded stochastically."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compress.core.context import Context
from compress.core.metrics import Metric
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.loop.train_state import round_weights_
from compress.training.objectives.objective import TargetLoss
from compress.training.optim.optimizer import build_optimizer
from tests.compress.training.builders import import_net, load_data

HERE = Path(__file__).parent
SETTINGS = {"precision": "bf16-true", "optimizer": "adamw", "batch_size": 16}


def run(source, root, stop_after=None, **more):
    def progress(task, done, total, note=""):
        if done == stop_after and "resumed" not in note:
            raise KeyboardInterrupt

    where = Context(root=root, data=load_data(), metric=Metric("accuracy"))
    training = Training(epochs=3, **{**SETTINGS, **more})
    return fit(source, training, TargetLoss(), replace(where, progress=progress), "train")


@pytest.mark.slow
def test_an_interrupted_training_ends_bit_identical_in_the_types_of_the_model(tmp_path):
    source = import_net(tmp_path / "source")  # with BatchNorm and dropout
    whole = run(source, tmp_path / "whole").module.state_dict()
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "parts", stop_after=2)
    parts = run(source, tmp_path / "parts").module.state_dict()
    full = run(source, tmp_path / "full", precision="fp32").module.state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name])
        assert weight.dtype == full[name].dtype
        assert torch.allclose(weight.float(), full[name].float(), atol=0.1)
    assert torch.equal(whole["head.weight"], whole["head.weight"].bfloat16().float())
    # BatchNorm has its full precision.
    assert not torch.equal(whole["norm.running_var"], whole["norm.running_var"].bfloat16().float())


def test_steps_smaller_than_the_rounding_add_up():
    net = nn.Linear(256, 256, bias=False)
    round_weights_(net)
    net.weight.data.fill_(1.0)  # the next smaller bf16 is 1 - 2**-8
    more = {**SETTINGS, "learning_rate": 1e-4, "weight_decay": 0}
    optimizer = build_optimizer(net, Training(epochs=1, **more))
    for _ in range(10):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    assert 1 - float(net.weight.detach().float().mean()) == pytest.approx(1e-3, rel=0.1)
    assert optimizer.state[net.weight]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.multiprocess
def test_all_ranks_round_alike(tmp_path, launch):
    launch(HERE / "bf16_ranks.py", 2, tmp_path / "weights")
    one, other, alone = torch.load(tmp_path / "weights")
    assert one.dtype == torch.bfloat16 and torch.equal(one, other)
    # The average of two rounded gradients is not the rounded average.
    assert torch.allclose(one.float(), alone.float(), atol=0.01)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"optimizer": "sgd"}, "optimizer: sgd"),
        ({"ema_decay": 0.9}, "ema_decay"),
        ({"parallel": {"strategy": "fsdp", "processes": 2}}, "strategy: fsdp"),
        ({"parallel": {"strategy": "deepspeed", "processes": 2}}, "strategy: deepspeed"),
        ({"parallel": {"processes": 2, "tensor": 2}}, "tensor or pipeline"),
        ({"parallel": {"processes": 2, "communication": "int8"}}, "communication: int8"),
    ],
)
def test_what_does_not_round_is_refused(settings, found):
    with pytest.raises(ValidationError, match=f"bf16-true is for .* found {found}; leave it out"):
        Training(epochs=1, **{**SETTINGS, **settings})
