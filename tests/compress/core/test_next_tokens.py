"""Perplexity in windows, and gates on next tokens."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from compress import Context, MaxDivergence, MinEqualTokens, PipelineInvalid, StageFailed
from compress.artifacts.eager_model import EagerModel
from compress.common.signature import AxisBounds, Signature, TensorSpec
from compress.core.metrics import Metric, evaluate
from compress.core.metrics.builtin import SlidingWindow
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.data.splits import Splits
from tests.export.builders import network_of

VOCABULARY, LENGTH = 8, 11
LANGUAGE = Loss(task=TASKS["causal-lm"])
TEXT = Signature(
    inputs=(TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64"),),
    axes={"length": AxisBounds(max=16)},
)
# The running mean of all tokens so far, so that a shorter context gives other scores.
RUNNING = """
import torch


class Running(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(8, 6), torch.nn.Linear(6, 8)

    def forward(self, input_ids):
        sums = self.table(input_ids).cumsum(1)
        return self.head(sums / torch.arange(1, 1 + input_ids.shape[1])[:, None])
"""
# After token t comes t + 1.
COUNTING = """
import torch


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.next = torch.nn.Parameter(torch.eye(8).roll(1, 1) * 9)

    def forward(self, input_ids):
        return self.next[input_ids]
"""


@pytest.fixture
def texts() -> Splits:
    ids = torch.randint(0, VOCABULARY, (5, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, :3] = labels[2, 7:] = -100
    rows = [{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)]
    return Splits({"val": rows}, batch_size=2)


@pytest.fixture
def running(tmp_path: Path) -> EagerModel:
    return network_of(tmp_path, RUNNING, "running:Running", TEXT)


@pytest.fixture
def context(tmp_path: Path, texts: Splits) -> Context:
    return Context(root=tmp_path / "out", data=texts, loss=LANGUAGE, metric=Metric("perplexity"))


@pytest.mark.parametrize(("length", "stride"), [(4, 2), (4, 3), (6, 1), (16, 5)])
def test_in_windows_every_token_counts_once_and_sees_its_window_alone(
    running, texts, length, stride
) -> None:
    metric = Metric("perplexity", (("context", length), ("stride", stride)), loss=LANGUAGE)
    metric.check()
    module, losses = running.load(), []
    module.requires_grad_(False)
    for row in texts.datasets["val"]:
        ids, labels = row["input_ids"], row["labels"]
        for place in range(1, LENGTH):
            # The first window that reaches the token, which the sample's end may have cut short.
            begin = max(0, -(-(place - length + 1) // stride)) * stride
            if labels[place] != -100:
                scores = module(ids[None, begin:place])[0, -1]
                losses.append(float(F.cross_entropy(scores, labels[place])))
    with running.open() as predict:
        found = evaluate(predict, texts, "val", metric).value
        plain = evaluate(predict, texts, "val", Metric("perplexity", loss=LANGUAGE)).value
    assert found == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)
    assert (found == pytest.approx(plain, rel=1e-6)) == (length > LENGTH)


def test_windows_that_leave_tokens_out_are_refused() -> None:
    def problem(name: str = "perplexity", **arguments: int) -> str:
        with pytest.raises(PipelineInvalid) as raised:
            Metric(name, tuple(arguments.items()), loss=LANGUAGE).check()
        return str(raised.value)

    assert "stride 4 is not below context 4; windows have to overlap" in problem(
        context=4, stride=4
    )
    assert "stride: Field required" in problem(context=4)
    assert "takes no settings" in problem("accuracy", context=4, stride=2)
    assert SlidingWindow(context=2, stride=1).context == 2


def test_divergence_is_that_of_the_probabilities(running, context, texts, tmp_path) -> None:
    module = running.load()
    with torch.no_grad():
        module.head.bias[0] += 1
    other = running.derive(tmp_path / "other", module)
    expected = []
    for row in texts.datasets["val"]:
        p, q = (m(row["input_ids"][None])[0].softmax(-1) for m in (running.load(), module))
        expected += (p * (p / q).log()).sum(-1).tolist()
    gate = MaxDivergence(nats=0.01)
    verdict = gate.evaluate(running, other, context)
    assert verdict.value == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert not verdict.passed
    assert gate.evaluate(running, running, context).value == pytest.approx(0, abs=1e-9)


def test_tokens_are_counted_until_the_first_that_differs(tmp_path, context) -> None:
    counting = network_of(tmp_path, COUNTING, "counting:Counting", TEXT)
    module = counting.load()
    with torch.no_grad():
        module.next[5] = module.next[5].roll(1)  # after 5 comes 7
    other = counting.derive(tmp_path / "other", module)
    rows = [{"input_ids": torch.tensor([1, t])} for t in (5, 4, 6)]
    context = Context(root=tmp_path / "out", data=Splits({"val": rows}, batch_size=2))
    gate = MinEqualTokens(at=3, tokens=10, prompts=3, prompt_tokens=2)
    verdict = gate.evaluate(counting, other, context)
    # 5 → differs at once; 4 → 5 is equal; 6 → 7 0 1 2 3 4 5 are.
    assert (verdict.value, verdict.passed) == ((0 + 1 + 7) / 3, False)
    assert gate.evaluate(counting, counting, context).value == 10
    # Two tokens of at most 16 were given.
    longer = MinEqualTokens(at=3, tokens=20, prompts=3, prompt_tokens=2)
    assert longer.evaluate(counting, counting, context).value == 14
    with pytest.raises(ValidationError, match="at: 65 is more than the 64 tokens generated"):
        MinEqualTokens(at=65)


def test_gates_on_next_tokens_are_for_language_models() -> None:
    problem = MaxDivergence(nats=1).unsuitable_task(TASKS["regression"])
    assert "compares next tokens of task: causal-lm, and a model for regression gives" in problem
    assert MinEqualTokens(at=1).unsuitable_task(TASKS["causal-lm"]) == ""


def test_labels_of_tokens_without_a_task_name_the_task() -> None:
    outputs, labels = torch.zeros(2, 5, 7), torch.ones(2, 5, dtype=torch.int64)
    for loss in (Loss(), Loss("cross_entropy")):
        with pytest.raises(StageFailed, match="labels of tokens write task: causal-lm"):
            loss.sums_and_counts(outputs, labels).sum(1)
