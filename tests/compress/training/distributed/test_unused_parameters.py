"""DDP looks for unused weights only where a model leaves some out, and never waits for them."""

import random

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.data.batch import Batch
from compress.training.config.training import Training
from compress.training.distributed import ddp
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data
from tests.compress.training.nets import classifier


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                x = x + layer(x)
        return self.norm(x)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (classifier(), set()),
        (classifier(spare_head=True), {"spare.weight", "spare.bias"}),
        (classifier(frozen=True), set()),
        (LayerDrop(), {f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")}),
    ],
)
def test_weights_that_a_call_leaves_out_are_found_and_nothing_changes(module, expected):
    module.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    assert ddp.unused_weights(module, Batch((torch.randn(2, 4),), None)) == expected
    drawn = torch.randn(2, 4)  # by the test itself
    assert not module.training and module.state_dict().keys() == before.keys()
    assert all(torch.equal(module.state_dict()[name], t) for name, t in before.items())
    assert random.getstate() == states[1]
    torch.set_rng_state(states[0])
    torch.randn(2, 4)
    assert torch.equal(drawn, torch.randn(2, 4))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("more", [{}, {"find_unused_parameters": True}])
def test_a_spare_head_stays_as_it_is_on_two_ranks(tmp_path, more):
    source = import_net(tmp_path / "source", spare_head=True)
    where = Context(root=tmp_path / "out", data=load_data("blobs"))
    parallel = {"processes": 2, "gradient_as_bucket_view": True, **more}
    training = Training(epochs=1, batch_size=16, keep="last", parallel=parallel)
    trained = fit(source, training, TargetLoss(), where, "train")
    before, after = source.load().state_dict(), trained.weights
    assert torch.equal(before["spare.weight"], after["spare.weight"].read())
    assert not torch.equal(before["head.weight"], after["head.weight"].read())


@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("factory", "more", "weight"),
    [
        ("leaving", {}, "norm.weight"),
        ("classifier", {"find_unused_parameters": False}, "spare.weight"),
    ],
)
def test_a_weight_that_is_missed_ends_the_training_with_its_name(tmp_path, factory, more, weight):
    arguments = {"spare_head": True} if more else {}
    source = import_net(tmp_path / "source", f"nets:{factory}", **arguments)
    where = Context(root=tmp_path / "out", data=load_data("blobs"))
    parallel = {"processes": 2, **more}
    training = Training(epochs=1, batch_size=16, keep="last", parallel=parallel)
    with pytest.raises(StageFailed, match=f"reach the weight '{weight}' in every step; set .*true"):
        fit(source, training, TargetLoss(), where, "train")


def test_a_static_graph_finds_them_by_itself():
    with pytest.raises(ValidationError, match="static_graph finds unused weights once"):
        Training(
            epochs=1,
            parallel={"processes": 2, "static_graph": True, "find_unused_parameters": True},
        )
