import pytest
import torch
import torch.nn.functional as F

from compress.common.errors import StageFailed
from compress.data.batch import Batch
from compress.distillation.distillation_objective import DistillationObjective
from compress.distillation.stage import Distill
from compress.distillation.terms import Cosine, Kl, Mse, OutputPair
from compress.training.objectives.objective import TargetLoss, Teaching
from tests.compress.training.builders import import_net


def soft_cross_entropy(student, teacher, temperature):
    return Kl(loss="kl", temperature=temperature).compute(OutputPair(student, teacher, None), [])


def labels_term(logits, target, weights=None):
    return TargetLoss(0.0, weights).mean("cpu", over_all=True)(logits, target)


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 5, generator=generator)


def test_it_is_hintons_term(logits):
    student, teacher = logits
    p, q = (teacher / 3).softmax(1), (student / 3).softmax(1)
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    assert torch.allclose(soft_cross_entropy(student, teacher, 3.0), expected, atol=1e-6)


def test_equal_logits_cost_nothing_and_the_gradient_keeps_its_size_when_it_is_hot(logits):
    student, teacher = logits
    assert soft_cross_entropy(student, student, 4.0).abs() < 1e-6
    norms = []
    for temperature in (20.0, 200.0):
        leaf = student.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(soft_cross_entropy(leaf, teacher, temperature), leaf)
        norms.append(float(gradient.norm()))
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_every_position_of_a_sequence_counts_alike(logits):
    student, teacher = logits
    twice = soft_cross_entropy(
        torch.stack([student, student], 2), torch.stack([teacher, teacher], 2), 2.0
    )
    assert torch.allclose(twice, soft_cross_entropy(student, teacher, 2.0))


def test_embeddings_are_compared_by_their_direction_or_their_place():
    student, teacher = torch.tensor([[3.0, 4.0], [0, 2]]), torch.tensor([[4.0, 3.0], [0, 6]])
    pair = OutputPair(student, teacher, None)
    assert float(Cosine(loss="cosine").compute(pair, [])) == pytest.approx((0.04 + 0) / 2)
    assert float(Mse(loss="mse").compute(pair, [])) == pytest.approx((1 + 1 + 0 + 16) / 4)


def test_unlabelled_samples_add_nothing_however_a_batch_is_shared_out(logits):
    student, _ = logits
    target = torch.tensor([0, -100, 2, -100, -100, 3, -100, 1])
    labelled = target >= 0
    expected = F.cross_entropy(student[labelled], target[labelled], reduction="sum") / 8
    assert torch.allclose(labels_term(student, target), expected)
    halves = [labels_term(student[i::2], target[i::2]) for i in (0, 1)]
    assert torch.allclose(sum(halves) / 2, expected)
    assert float(labels_term(student, torch.full((8,), -100))) == 0
    assert torch.allclose(labels_term(student, target, (2.0,) * 5), 2 * expected)


def test_an_objective_weighs_the_teacher_and_the_labels(tmp_path):
    teacher = import_net(tmp_path / "t", dropout=0.0)
    inputs, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, -100, 1])
    answers = torch.randn(6, 3, requires_grad=True)
    taught = teacher.load()(inputs)
    teaching = Teaching(temperature=2.0, soft_weight=0.7, hard_weight=0.2)
    objective = DistillationObjective.from_teaching(teaching, teacher, TargetLoss())
    loss = objective.prepare("cpu")
    soft, hard = soft_cross_entropy(answers, taught, 2.0), labels_term(answers, target)
    assert torch.allclose(loss((answers,), Batch((inputs,), target)), 0.7 * soft + 0.2 * hard)
    assert torch.allclose(loss((answers,), Batch((inputs,), None)), 0.7 * soft)
    mse = Teaching(loss="mse", soft_weight=1)
    without = DistillationObjective.from_teaching(mse, teacher, TargetLoss())
    mse = without.prepare("cpu")((answers,), Batch((inputs,), target))
    assert torch.allclose(mse, F.mse_loss(answers, taught))
    (gradient,) = torch.autograd.grad(mse, answers)
    assert gradient.isfinite().all()
    assert repr(objective) != repr(without)
    with pytest.raises(StageFailed, match=r"output has shape \(6, 3\) and the model's \(6, 2\)"):
        loss((answers[:, :2],), Batch((inputs,), None))


def test_labels_count_by_default_where_outputs_are_logits():
    assert [Teaching(loss=loss).labels_weight for loss in ("kl", "mse", "cosine")] == [0.1, 0, 0]
    assert Teaching(loss="mse", hard_weight=0.3).labels_weight == 0.3
    assert [term.loss for term in Distill(teacher="a", epochs=1).terms] == ["kl", "labels"]
    assert [term.loss for term in Distill(teacher="a", epochs=1, loss="cosine").terms] == ["cosine"]
