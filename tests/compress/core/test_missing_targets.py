"""Batches without any target are passed over by a metric, as single samples without one are."""

from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.common.errors import StageFailed
from compress.core.metrics import Metric, evaluate
from compress.core.objectives.loss import Loss
from compress.data.splits import Splits


class Partly:
    """Samples of three classes, some without a label."""

    def __init__(self, labelled: range) -> None:
        self.labelled = labelled

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        x = torch.nn.functional.one_hot(torch.tensor(index % 3), 3).float()
        # One label of four is wrong.
        label = (index + (index % 4 == 0)) % 3
        return x, label if index in self.labelled else None


def score(labelled: range, name: str = "accuracy") -> Any:
    data = Splits({"val": Partly(labelled)}, batch_size=16)
    return evaluate(lambda *x: x, data, "val", Metric(name, loss=Loss("cross_entropy")))


@pytest.mark.parametrize("name", ["accuracy", "loss", "f1"])
@pytest.mark.parametrize("labelled", [range(16, 48), range(32), range(16, 40)])
def test_the_metric_is_that_of_the_labelled_samples(labelled: range, name: str) -> None:
    found = score(labelled, name)
    assert found.samples == len(labelled)
    rows = [Partly(labelled)[i] for i in labelled]
    x, y = torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])
    if name == "accuracy":
        assert found.value == float((x.argmax(1) == y).float().mean()) == 0.75
    elif name == "loss":
        assert found.value == pytest.approx(float(nn.functional.cross_entropy(x, y)))


@pytest.mark.parametrize("name", ["accuracy", "r2", "f1"])
def test_a_split_without_any_target_has_no_metric(name: str) -> None:
    with pytest.raises(StageFailed, match=f"metric {name} needs targets and no sample has one"):
        score(range(0), name)


def test_training_evaluates_what_is_labelled() -> None:
    data = {"train": Partly(range(48)), "val": Partly(range(16, 48))}
    artifact = compress.train(nn.Linear(3, 3), data=data, epochs=1, batch_size=16)
    (epoch,) = artifact.manifest.facts["history"]
    assert 0 <= epoch["metric"] <= 1


@pytest.mark.parametrize("name", ["accuracy", "r2", "f1"])
def test_the_first_process_may_have_no_target(name: str) -> None:
    x, y = torch.randn(9, 3), torch.arange(9) % 3
    if name == "r2":
        y = x + 0.1 * torch.randn(9, 3)
    metric = Metric(name, loss=Loss("mse" if name == "r2" else "cross_entropy"))
    whole, *shares = (metric.meter() for _ in range(4))
    whole.update(x, y)
    for share, rows in zip(shares[1:], (slice(4), slice(4, 9)), strict=True):
        share.update(x[rows], y[rows])
    shares[0].add_shares_([share.state() for share in shares])
    assert shares[0].compute() == pytest.approx(whole.compute())


def test_no_process_with_a_target_is_said() -> None:
    share = Metric("accuracy").meter()
    share.add_shares_([None, None])
    with pytest.raises(StageFailed, match="needs targets and no sample has one"):
        share.compute()
