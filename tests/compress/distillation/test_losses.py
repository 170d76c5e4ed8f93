import pytest
import torch
import torch.nn.functional as F

from compress.distillation.losses import distillation_loss, soft_cross_entropy


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


def test_the_terms_are_weighted_and_labels_may_be_missing(logits):
    student, teacher = logits
    target = torch.arange(8) % 5
    soft, hard = soft_cross_entropy(student, teacher, 2.0), F.cross_entropy(student, target)

    def loss(target, soft_weight, hard_weight):
        return distillation_loss(
            student,
            teacher,
            target,
            temperature=2.0,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
        )

    assert torch.allclose(loss(target, 0.7, 0.2), 0.7 * soft + 0.2 * hard)
    assert torch.equal(loss(None, 0.7, 0.2), 0.7 * soft)
    assert torch.equal(loss(target, 0.7, 0.0), 0.7 * soft)


def test_every_position_of_a_sequence_counts_alike(logits):
    student, teacher = logits
    twice = soft_cross_entropy(
        torch.stack([student, student], 2), torch.stack([teacher, teacher], 2), 2.0
    )
    assert torch.allclose(twice, soft_cross_entropy(student, teacher, 2.0))
