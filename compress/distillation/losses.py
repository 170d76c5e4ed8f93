"""The mathematics of learning from a teacher's outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compress.training.objective import cross_entropy


def soft_cross_entropy(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of softened distributions, times T squared.

    After Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), section
    2: gradients of softened targets shrink with 1/T squared, and the factor undoes it. Classes lie
    on axis 1, as for ``cross_entropy``; the mean is taken over all other axes.
    """
    student = F.log_softmax(student_logits / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=1)
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
    return divergence.mean() * temperature**2


def distillation_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    target: torch.Tensor | None,
    *,
    temperature: float,
    soft_weight: float,
    hard_weight: float,
    label_smoothing: float = 0.0,
    class_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the teacher's term and the labels' term.

    Args:
        student_logits: outputs of the model that learns.
        teacher_logits: outputs of the model learnt from.
        target: labels; None leaves their term out.
        temperature: how far both distributions are softened in the teacher's term.
        soft_weight: weight of the teacher's term.
        hard_weight: weight of the labels' term.
        label_smoothing: share of the target spread over all classes.
        class_weights: weight of each class in the labels' term.
    """
    loss = soft_weight * soft_cross_entropy(student_logits, teacher_logits, temperature)
    if target is None or hard_weight == 0:
        return loss
    hard = cross_entropy(student_logits, target, class_weights, label_smoothing)
    return loss + hard_weight * hard
