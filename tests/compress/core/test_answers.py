"""Models are called once for the same inputs, whatever compares their outputs."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from compress import Context, LabelAgreement, MaxDrop, MinCosine, Parity
from compress.artifacts.eager_model import EagerModel
from compress.common.counts import counted
from compress.common.dependency_recorder import recording
from compress.common.signature import Signature, TensorSpec
from compress.core import context as context_module
from compress.core.context import Caches, KeptAnswers
from compress.core.metrics import Metric
from compress.data.splits import Splits

ROWS = "forwards.eager.rows"


class Mixed(nn.Module):
    """Outputs of several types and shapes; in eval mode, of the rows of a batch by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y, y.bfloat16(), y.argmax(1), y > 0, y[:, :0], y[:, 1:3]


def model_of(module: nn.Module) -> EagerModel:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 6)),))
    return EagerModel.from_module(module, signature=signature)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    samples = TensorDataset(torch.randn(50, 6), torch.arange(50) % 4)
    return Context(root=tmp_path, data=Splits({"val": samples}, batch_size=16))


def rows_of(measure) -> int:
    before = counted().get(ROWS, 0)
    measure()
    return counted().get(ROWS, 0) - before


def test_gates_and_metrics_call_a_model_once_for_each_sample(context: Context) -> None:
    before, after = model_of(nn.Linear(6, 4)), model_of(nn.Linear(6, 4))

    for model in (before, after):
        context.batch_dependence(model)  # has calls of its own

    def judge_by_all() -> None:
        for gate in (
            MaxDrop(points=1),
            LabelAgreement(minimum=0.5),
            MinCosine(minimum=0),
            Parity(atol=1),
        ):
            gate.evaluate(before, after, context)
        replace(context, metric=Metric("loss")).score(after)

    assert rows_of(judge_by_all) == 2 * 50
    assert rows_of(judge_by_all) == 0
    relabelled = TensorDataset(context.data.datasets["val"].tensors[0], torch.zeros(50).long())
    other = Splits({"val": relabelled}, batch_size=16)
    other_context = replace(context, data=other)
    assert rows_of(lambda: other_context.score(after)) == 0
    labels = after.load()(relabelled.tensors[0]).argmax(1)
    assert other_context.score(after) == pytest.approx(float((labels == 0).float().mean()))


def test_kept_outputs_are_those_of_the_model(context: Context) -> None:
    model, x = model_of(Mixed()), torch.randn(8, 6)
    with model.open() as predict, context.predictor(model) as kept:
        for _ in range(2):
            for expected, got in zip(predict(x), kept(x), strict=True):
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                assert torch.equal(got, expected)
        got[:] = 0  # nothing is shared
        assert torch.equal(kept(x)[-1], predict(x)[-1])
    with context.caches.answers.predictor(model, "cpu", 1, by_row=True, keep_errors=True) as kept:
        mixed = torch.stack([x[5], x[2], x[5]])
        assert rows_of(lambda: kept(mixed)) == 0
        for whole, part in zip(predict_rows(model, x), kept(mixed), strict=True):
            assert torch.equal(part, whole[[5, 2, 5]])
        new = torch.cat([mixed, torch.randn(1, 6)])
        assert rows_of(lambda: kept(new)) == 4
        assert rows_of(lambda: kept(new[3:])) == 1, "rows come from evaluations alone"
    with context.predictor(model) as kept:
        assert rows_of(lambda: kept(mixed)) == 3, "by default another batch is another call"
    assert not context.batch_dependence(model).why_not_joined
    with context.predictor(model) as kept:
        assert rows_of(lambda: kept(x[[1, 7]])) == 0, "each row has the same answer in every batch"
        assert rows_of(lambda: kept(torch.zeros(2, 6))) == 2
        assert rows_of(lambda: kept(torch.zeros(1, 6))) == 0


def predict_rows(model: EagerModel, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with model.open() as predict:
        return predict(x)


def test_what_a_model_read_counts_for_all_that_read_its_answers(context: Context) -> None:
    class Reading(nn.Linear):
        pass

    model, file = model_of(Reading(6, 4)), str(Path(__file__).resolve())
    answers_of = context.caches.answers._answers_of(model, "cpu", 1)
    context.score(model)
    answers_of._recorded.files.add(file)
    with recording() as recorded:
        Parity(atol=1).evaluate(model, model, context)
    assert file in recorded.files


def test_the_oldest_answers_go_and_large_ones_are_not_kept(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = model_of(nn.Linear(6, 4)), model_of(nn.Linear(6, 4))
    size = 50 * 4 * 4
    monkeypatch.setattr(context_module, "MAX_TOTAL_BYTES", size)
    for model in (first, second):
        context.batch_dependence(model)
    context.score(first)
    assert rows_of(lambda: Parity(atol=1).evaluate(first, first, context)) == 0
    context.score(second)
    assert rows_of(lambda: Parity(atol=1).evaluate(first, first, context)) >= 50
    monkeypatch.setattr(context_module, "MAX_BYTES", size - 1)
    small = replace(context, caches=Caches())
    small.score(first)
    assert not small.caches.answers.has_room(first, "cpu", 1)
    assert rows_of(lambda: Parity(atol=1).evaluate(first, second, small)) > 50


def test_another_process_begins_without_answers(context: Context) -> None:
    model = model_of(nn.Linear(6, 4))
    context.score(model)
    sent = pickle.loads(pickle.dumps(context.caches.answers))
    assert isinstance(sent, KeptAnswers)
    with sent.predictor(model, "cpu", 1) as kept:
        assert rows_of(lambda: kept(torch.randn(3, 6))) == 3


def test_a_scalar_has_no_rows_to_be_kept_apart() -> None:
    module = model_of(nn.ReLU())
    with KeptAnswers().predictor(module, "cpu", 1) as kept:
        for value in (2.0, -2.0):
            assert kept(torch.tensor(value))[0].item() == max(value, 0)
