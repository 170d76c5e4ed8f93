"""What a task decides: which axis has the classes, which targets count, and which gates fit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from compress import Context, LabelAgreement, MaxDrop, MinCosine, PipelineInvalid, StageFailed
from compress.core.gates import rule_in_words, value_in_words
from compress.core.metrics import Metric, default_metric
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.distillation.distillation_objective import DistillationObjective
from compress.distillation.terms import Kl
from compress.training.objectives.objective import TargetLoss

BATCH, LENGTH, CLASSES = 3, 5, 7


@pytest.fixture
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (batch, length, classes), and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(BATCH, LENGTH, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator)
    labels[0, :2] = labels[2, 3:] = -100
    return outputs, labels


@pytest.mark.parametrize("name", ["token-classification", "causal-lm"])
def test_tokens_have_their_classes_last(tokens, name) -> None:
    outputs, labels = tokens
    loss = Loss(task=TASKS[name])
    scores, known = outputs, labels
    if name == "causal-lm":  # as transformers do: the scores at a position are the next token's
        scores, known = outputs[:, :-1], labels[:, 1:]
    expected = F.cross_entropy(scores.reshape(-1, CLASSES), known.reshape(-1))
    assert loss.function()(outputs, labels, label_smoothing=0.0) == pytest.approx(float(expected))
    total, count = loss.sums_and_counts(outputs, labels).sum(1)
    assert total / count == pytest.approx(float(expected))
    assert count == loss.function().label_count(labels) == int((known != -100).sum())
    right = (scores.argmax(-1) == known).sum() / count
    assert Metric("accuracy", loss=loss).score(outputs, labels) == pytest.approx(float(right))
    with pytest.raises(StageFailed, match=r"\(batch, length, classes\) and labels \(batch, length"):
        loss.function()(outputs[:, 0], labels)


def test_tokens_are_distilled_over_their_classes(tokens) -> None:
    outputs, labels = tokens
    expected = outputs.roll(1, 0)
    objective = DistillationObjective(
        SimpleNamespace(), (Kl(loss="kl"),), ((),), TargetLoss(loss=Loss(task=TASKS["causal-lm"]))
    )
    loss = objective.prepare("cpu")
    loss._teacher_features = lambda batch: {"": expected}
    own, taught = (F.log_softmax(x[:, :-1] / 4, -1) for x in (outputs, expected))
    divergence = F.kl_div(own, taught, reduction="none", log_target=True).sum(-1).mean() * 16
    found = loss((outputs,), SimpleNamespace(target=labels))
    assert found == pytest.approx(float(divergence), rel=1e-5)


def test_each_label_of_several_counts() -> None:
    outputs = torch.tensor([[2.0, 1.0, -1.0], [-1.0, 3.0, -2.0]])
    # One label each: without a task these floats are probabilities of classes.
    targets = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    loss = Loss(task=TASKS["multilabel"])
    assert loss.name_for(outputs, targets) == "binary_cross_entropy"
    assert Metric("accuracy", loss=loss).score(outputs, targets) == pytest.approx(5 / 6)
    assert Metric("accuracy").score(outputs, targets) == 0.5
    other = outputs.clone()
    other[0, 1] = -1.0  # the largest output stays the same one
    compared = SimpleNamespace(task=loss.task)
    for task, share in ((compared.task, 5 / 6), (None, 1.0)):
        assert _agreement(outputs, other, task) == pytest.approx(share)


def test_labels_of_tokens_are_compared_at_every_position(tokens) -> None:
    outputs, _ = tokens
    other = outputs.clone()
    other[1, 2, (int(outputs[1, 2].argmax()) + 1) % CLASSES] = 9
    share = 1 - 1 / (BATCH * LENGTH)
    assert _agreement(outputs, other, TASKS["causal-lm"]) == pytest.approx(share)


def _agreement(expected: torch.Tensor, got: torch.Tensor, task) -> float:
    return LabelAgreement().measure(*_compared(expected, got, task)).value


def _compared(expected: torch.Tensor, got: torch.Tensor, task=None):
    """Return two artifacts that give these outputs, and a context that runs them."""
    from contextlib import nullcontext

    before, after = (SimpleNamespace(signature=None, out=x) for x in (expected, got))
    context = SimpleNamespace(
        task=task,
        predictor=lambda artifact: nullcontext(lambda: (artifact.out,)),
        judged_batch_size=lambda *artifacts: None,
        comparison_inputs=lambda signature, size: [()],
    )
    return before, after, context


def test_the_cosine_is_that_of_the_worst_sample() -> None:
    vectors = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    turned = torch.tensor([[2.0, 0.0], [4.0, 3.0]])
    gate = MinCosine(minimum=0.99)
    assert gate.measure(*_compared(vectors, 7 * vectors)).value == pytest.approx(1)
    verdict = gate.evaluate(*_compared(vectors, turned))
    assert verdict.value == pytest.approx(24 / 25) and not verdict.passed
    assert gate.evaluate(*_compared(vectors, vectors * torch.nan)).value is None
    assert "shapes" in gate.evaluate(*_compared(vectors, turned[:, :1])).reason


@pytest.mark.parametrize("name", TASKS)
def test_a_task_proposes_gates_that_suit_it(name) -> None:
    from pydantic import TypeAdapter

    from compress.core.gates import AnyGate

    task = TASKS[name]
    metric = default_metric(Loss(task=task))
    assert metric.name == task.metric
    for settings in task.gates:
        gate = TypeAdapter(AnyGate).validate_python(settings)
        assert not gate.unsuitable_task(task) and not gate.unsuitable_metric(task.metric)
    assert bool(LabelAgreement().unsuitable_task(task)) == (not task.has_labels)


@pytest.mark.parametrize(
    ("task", "loss"), [("regression", "cross_entropy"), ("classification", "mse")]
)
def test_a_loss_of_another_task_is_refused(task, loss) -> None:
    with pytest.raises(PipelineInvalid, match=f"task: {task} takes .*, found {loss}"):
        Loss(loss, task=TASKS[task])
    assert Loss("own:loss", task=TASKS[task]).is_custom


def test_tasks_without_a_default_loss_ask_for_one() -> None:
    with pytest.raises(StageFailed, match="task: detection has no default loss; write loss: mod"):
        Loss(task=TASKS["detection"]).name_for(torch.zeros(2, 4), torch.zeros(2, 4))


def test_a_drop_is_in_points_only_where_1_is_best() -> None:
    verdict = MaxDrop(points=500).verdict(20.0)
    words = {m: rule_in_words(verdict, m) for m in ("r2", "mse", "own:perplexity")}
    assert words == {
        "r2": "loses at most 500 points of r2",
        "mse": "mse rises by at most 5",
        "own:perplexity": "own:perplexity gets worse by at most 5",
    }
    assert [value_in_words(verdict, m) for m in words] == ["20 points", "0.2", "0.2"]


def test_a_task_and_the_targets_kind_are_inferred_together(blobs, tmp_path: Path) -> None:
    loss = Loss().infer_targets(blobs)
    assert loss.task is TASKS["classification"] and loss.targets == "labels"
    assert replace(Context(tmp_path), loss=loss).task is loss.task
