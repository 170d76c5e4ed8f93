"""An optimizer step is the same, however its samples are split into micro-batches."""

import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.core.objectives.loss import Loss
from compress.data.batch import collate
from compress.training.config.training import Training
from compress.training.distributed.base import Strategy
from compress.training.loop.train_state import TrainState
from compress.training.objectives.objective import TargetLoss

OWN = """
import torch.nn.functional as F

def over_samples(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none").mean(1).mean()

def over_tokens(outputs, targets):
    return F.cross_entropy(outputs, targets.where(targets != 0, -100))

class OverTokens:
    def __call__(self, outputs, targets):
        return over_tokens(outputs, targets)

    def count(self, targets):
        return (targets > 0).sum()

counted = OverTokens()

def miscounted(outputs, targets):
    return outputs.mean()

miscounted.count = lambda targets: targets
"""


class Tagger(nn.Module):
    """Classifies each token of a sequence by itself: padding changes nothing but the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, tokens):
        return self.layers(tokens).movedim(-1, 1)


def samples(lengths, ignored=0.3):
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        tokens = torch.randint(9, (length,), generator=generator)
        labels = tokens % 3
        labels[torch.rand(length, generator=generator) < ignored] = -100
        yield {"tokens": tokens, "labels": labels}


def step(loss, *micro_batches):
    torch.manual_seed(0)
    module = Tagger()
    training = Training(epochs=1, optimizer="sgd", learning_rate=1.0)
    state = TrainState(module, loss, training, Strategy(), "cpu", lambda: None)
    value = state.train_step([collate(part) for part in micro_batches], 0)
    return value, torch.cat([weight.detach().flatten() for weight in module.parameters()])


def difference(objective, data, size=2):
    """Return by how much the weights and the loss differ if the samples are split."""
    loss = objective.prepare("cpu")
    value, weights = step(loss, data)
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    split_value, split_weights = step(loss, *parts)
    return max(abs(value - split_value), float((weights - split_weights).abs().max()))


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: TargetLoss(loss=Loss(f"own:{name}", folder=tmp_path))


@pytest.mark.parametrize(
    "objective",
    [TargetLoss(), TargetLoss(0.1), TargetLoss(0.0, (1.0, 5.0, 2.0))],
    ids=["plain", "smoothed", "weighted"],
)
def test_ignored_labels_and_padding_of_any_length_leave_the_step_alone(objective):
    data = list(samples([9, 1, 5, 2, 7, 7, 3, 4]))
    data[2]["labels"][:] = data[3]["labels"][:] = -100  # a micro-batch without a label
    assert difference(objective, data) < 1e-6


def test_a_class_weight_of_1_is_neutral_where_labels_are_ignored():
    data = list(samples([4, 4, 2, 3]))
    plain = step(TargetLoss().prepare("cpu"), data)
    weighted = step(TargetLoss(0.0, (1.0, 1.0, 1.0)).prepare("cpu"), data)
    assert weighted[0] == pytest.approx(plain[0], rel=1e-6)
    assert torch.allclose(plain[1], weighted[1], atol=1e-6)


def test_a_step_whose_labels_are_all_ignored_has_no_loss():
    data = list(samples([3, 3], ignored=1.0))
    value, weights = step(TargetLoss().prepare("cpu"), data[:1], data[1:])
    assert value == 0
    assert torch.equal(weights, step(TargetLoss().prepare("cpu"), data)[1])
    assert weights.isfinite().all()


def test_a_function_of_the_users_is_a_mean_over_samples_or_over_what_it_counts(own):
    data = list(samples([4] * 6, ignored=0.0))
    data[0]["labels"][:] = data[1]["labels"][:] = 0  # a micro-batch of which nothing is counted
    assert difference(own("over_samples"), data) < 1e-6
    assert difference(own("counted"), data) < 1e-6
    data[1]["labels"][:] = 1
    assert difference(own("over_tokens"), data) > 1e-3  # it does not tell its count


def test_the_metric_loss_of_a_counting_function_adds_up(own):
    loss = own("counted").loss
    outputs = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(24).view(6, 4) % 3
    targets[3:] = 0
    whole, count = loss.sums_and_counts(outputs, targets).sum(1)
    parts = [loss.sums_and_counts(outputs[i : i + 3], targets[i : i + 3]).sum(1) for i in (0, 3)]
    assert count == parts[0][1] == 8
    assert parts[1].tolist() == [0, 0]
    assert whole == pytest.approx(parts[0][0])
    # Beside a teacher: divided by all targets.
    beside = loss.function()(outputs, targets, over_all=True)
    assert float(beside) == pytest.approx(whole / 24)


def test_a_count_that_is_no_number_is_named(own):
    with pytest.raises(
        StageFailed, match=r"count of loss 'own:miscounted' returned int64 \[n, 4\]"
    ):
        step(own("miscounted").prepare("cpu"), list(samples([4, 4])))
