"""Distillation losses as pure functions, each with its paper.

Shapes: N samples, C classes, D features. Logits are [N, C, …], classes on axis 1 as for
``cross_entropy``: each position of the axes behind it, such as a pixel, is a sample. Features are
flattened behind the first axis where the relations between samples are compared. Every function
returns a scalar that is 0 for equal inputs.
"""

from __future__ import annotations

from compress.common.lazy_modules import F, torch
from compress.training.objectives.objective import cosine_distance

# Keeps the square root's gradient finite at 0, and the distances of equal samples from 0 / 0.
TINY = 1e-12


def decoupled_divergence(
    student: torch.Tensor,
    teacher: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float,
    target_weight: float,
    other_weight: float,
) -> torch.Tensor:
    """Return the KL divergences of "target or not" and of the other classes, times T².

    After Zhao et al., "Decoupled Knowledge Distillation" (2022), with its alpha (``target_weight``)
    and beta (``other_weight``): plain distillation is this with alpha 1 and as beta the teacher's
    probability of the other classes, which is near zero where the teacher is confident. ``target``
    are class indices, [N, …].
    """
    student_NC, teacher_NC = class_rows(student), class_rows(teacher)
    is_target = F.one_hot(target.flatten().long(), student_NC.shape[1]).bool()

    def parts(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = F.log_softmax(logits / temperature, dim=1)
        others = log_p[~is_target].view(len(logits), -1)
        binary = torch.stack([log_p[is_target], others.logsumexp(1)], 1)
        return binary, F.log_softmax(others, dim=1)

    (binary, others), (teacher_binary, teacher_others) = parts(student_NC), parts(teacher_NC)
    split = F.kl_div(binary, teacher_binary, reduction="batchmean", log_target=True)
    among = F.kl_div(others, teacher_others, reduction="batchmean", log_target=True)
    return (target_weight * split + other_weight * among) * temperature**2


def correlation_distance(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    temperature: float,
    between_weight: float,
    within_weight: float,
) -> torch.Tensor:
    """Return one minus Pearson's correlation of probabilities, along classes and along samples.

    After Huang et al., "Knowledge Distillation from A Stronger Teacher" (2022), DIST: it matters
    how classes rank for a sample (inter-class), and how samples rank within a class (intra-class).
    """
    student_NC = (class_rows(student) / temperature).softmax(1)
    teacher_NC = (class_rows(teacher) / temperature).softmax(1)
    between = _pearson_distance(student_NC, teacher_NC)
    within = _pearson_distance(student_NC.T, teacher_NC.T)
    return (between_weight * between + within_weight * within) * temperature**2


def class_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [N, C, …] as rows of classes, one for each place of the other axes."""
    return logits.movedim(1, -1).flatten(0, -2)


def _pearson_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return 1 - F.cosine_similarity(a, b, dim=1).mean()


# Both after Park et al., "Relational Knowledge Distillation" (2019): RKD-D and RKD-A.
def relational_distances(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compare the pairwise distances of samples, in units of each model's mean distance (RKD-D)."""
    return F.smooth_l1_loss(_distances(student), _distances(teacher))


def relational_angles(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compare the angles that each three samples form (RKD-A)."""
    return F.smooth_l1_loss(_angles(student), _angles(teacher))


def _distances(x: torch.Tensor) -> torch.Tensor:
    """Return the pairwise distances divided by their mean, without the zeros on the diagonal."""
    rows = x.flatten(1)
    squared = (rows[:, None] - rows[None]).square().sum(2)
    apart = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    # The square root has no gradient at 0, so the diagonal is masked.
    distances = torch.where(apart, (squared + TINY).sqrt(), 0)
    mean = distances.sum() / apart.sum().clamp(min=1)
    return distances / (mean + TINY)


def _angles(x: torch.Tensor) -> torch.Tensor:
    """Return the cosine of the angle at each sample (first axis) between each two others."""
    rows = x.flatten(1)
    directions = F.normalize(rows[None] - rows[:, None], dim=2, eps=1e-6)
    return directions @ directions.transpose(1, 2)


def attention_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return the squared distance of two attention maps of length 1, as a mean over samples: 0 … 4.

    After Zagoruyko and Komodakis, "Paying More Attention to Attention" (2017): where features are
    large, squared and summed over channels. Features are (N, C, H, W), the larger map averaged to
    the size of the smaller one, or tokens (N, T, D).
    """
    maps = [_attention(student), _attention(teacher)]
    if maps[0].dim() == 3 and maps[0].shape != maps[1].shape:
        height, width = (min(m.shape[axis] for m in maps) for axis in (1, 2))
        maps = [F.adaptive_avg_pool2d(m, (height, width)) for m in maps]
    a, b = (F.normalize(m.flatten(1), dim=1) for m in maps)
    return (a - b).square().sum(1).mean()


def _attention(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(1 if x.dim() == 4 else -1)


def similarity_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compare the similarities between the samples of a batch.

    After Tung and Mori, "Similarity-Preserving Knowledge Distillation" (2019): the squared
    difference of the two matrices of inner products, rows of length 1, summed and divided by N².
    """

    def similarities(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1)
        return F.normalize(rows @ rows.T, dim=1)

    difference = similarities(student) - similarities(teacher)
    return difference.square().mean()


def contrastive_distance(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the InfoNCE loss of finding a sample's teacher features among those of the batch.

    InfoNCE after van den Oord et al., "Representation Learning with Contrastive Predictive Coding"
    (2018), between student and teacher as in Tian et al., "Contrastive Representation Distillation"
    (2020), with the batch's other samples as the only negatives. The loss of a student equal to its
    teacher is subtracted, so that equal features give 0.
    """
    s, t = (F.normalize(x.flatten(1), dim=1) for x in (student, teacher))
    own = torch.arange(len(s), device=s.device)
    of_equals = F.cross_entropy(t @ t.T / temperature, own)
    return F.cross_entropy(s @ t.T / temperature, own) - of_equals


def hint_distance(student: torch.Tensor, teacher: torch.Tensor, compare: str) -> torch.Tensor:
    """Return the distance of (projected) features, after Romero et al., "FitNets" (2015).

    ``compare`` is `mse`, the mean squared difference, or `cosine`, of the vectors of channels.
    """
    if compare == "mse":
        return F.mse_loss(student, teacher)
    return cosine_distance(student, teacher)
