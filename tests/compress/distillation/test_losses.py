"""Each loss against values worked out by hand, or by the paper's formula computed another way."""

import itertools
import math

import pytest
import torch

from compress.common.errors import StageFailed
from compress.distillation.terms import (
    Attention,
    Contrastive,
    Cosine,
    Dist,
    Dkd,
    Hint,
    Kl,
    Labels,
    OutputPair,
    Relational,
    Similarity,
)
from compress.training.objectives.objective import TargetLoss


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 5, generator=generator)


TARGET = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


def decoupled_divergence(student, teacher, target, **settings):
    return Dkd(loss="dkd", **settings).compute(OutputPair(student, teacher, target), [])


def correlation_distance(student, teacher, **settings):
    return Dist(loss="dist", **settings).compute(OutputPair(student, teacher, None), [])


relational_distances = Relational(loss="relational", angle_weight=0).distance
relational_angles = Relational(loss="relational", distance_weight=0, angle_weight=1).distance
attention_distance = Attention(loss="attention", student="a").distance
similarity_distance = Similarity(loss="similarity").distance
hint = {name: Hint(loss="hint", compare=name).distance for name in ("mse", "cosine")}

EVERY = {
    "dkd": lambda s, t: decoupled_divergence(s, t, TARGET),
    "dist": correlation_distance,
    "distances": relational_distances,
    "angles": relational_angles,
    "attention": lambda s, t: attention_distance(s[:, :, None], t[:, :, None]),
    "similarity": similarity_distance,
    "contrastive": Contrastive(loss="contrastive").distance,
    **hint,
}


@pytest.mark.parametrize("name", EVERY)
def test_equals_cost_nothing_and_gradients_are_finite(logits, name):
    student, teacher = logits
    assert EVERY[name](teacher, teacher).abs() < 1e-5
    assert EVERY[name](student, teacher) > 1e-3
    # Duplicates and zeros are where roots and norms have no gradient.
    hard = [student, teacher.clone(), torch.zeros(8, 5), student[:1].expand(8, 5).clone()]
    for start in hard:
        leaf = start.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(EVERY[name](leaf, teacher), leaf)
        assert gradient.isfinite().all()


def test_decoupled_divergence_is_the_plain_one_with_the_teachers_own_weights():
    student, teacher = torch.tensor([[1.0, 2.0, 0.5]]), torch.tensor([[0.3, 1.5, 2.0]])
    target, hot = torch.tensor([1]), 2.0
    p = (teacher / hot).softmax(1)
    others = 1 - float(p[0, 1])
    decoupled = decoupled_divergence(
        student, teacher, target, temperature=hot, target_weight=1, other_weight=others
    )
    plain = Kl(loss="kl", temperature=hot).compute(OutputPair(student, teacher, None), [])
    assert torch.allclose(decoupled, plain, atol=1e-6)


def test_decoupled_divergence_is_its_two_parts(logits):
    student, teacher = logits
    expected = 0.0
    for s, t, y in zip(student, teacher, TARGET, strict=True):
        q, p = (s / 3).softmax(0), (t / 3).softmax(0)
        binary_q, binary_p = [q[y], 1 - q[y]], [p[y], 1 - p[y]]
        rest = [i for i in range(5) if i != y]
        rest_q, rest_p = [q[i] / (1 - q[y]) for i in rest], [p[i] / (1 - p[y]) for i in rest]
        for weight, a, b in ((2, binary_p, binary_q), (7, rest_p, rest_q)):
            expected += weight * sum(float(x * (x / z).log()) for x, z in zip(a, b, strict=True))
    found = decoupled_divergence(
        student, teacher, TARGET, temperature=3, target_weight=2, other_weight=7
    )
    assert float(found) == pytest.approx(9 * expected / 8, rel=1e-4)


def test_correlations_are_pearsons(logits):
    student, teacher = logits
    q, p = (student / 2).softmax(1), (teacher / 2).softmax(1)

    def mean_r(a, b):
        pairs = zip(a, b, strict=True)
        return sum(float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairs) / len(a)

    found = correlation_distance(student, teacher, temperature=2, between_weight=2, within_weight=3)
    expected = 4 * (2 * (1 - mean_r(q, p)) + 3 * (1 - mean_r(q.T, p.T)))
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_distances_are_in_units_of_their_mean():
    # Sides 3, 4, 5 with mean 4 against sides 1, 1, 2 with mean 4/3.
    student = torch.tensor([[0.0, 0], [3, 0], [0, 4]])
    teacher = torch.tensor([[0.0], [1], [2]])
    differences = [3 / 4 - 3 / 4, 4 / 4 - 6 / 4, 5 / 4 - 3 / 4]
    expected = 2 * sum(0.5 * d**2 for d in differences) / 9
    assert float(relational_distances(student, teacher)) == pytest.approx(expected, rel=1e-5)
    assert relational_distances(7 * student, student) < 1e-9


def test_angles_are_those_of_every_three_samples(logits):
    student, teacher = logits[0][:4], logits[1][:4]

    def cosine(x, i, j, k):
        a, b = x[j] - x[i], x[k] - x[i]
        return float(a @ b / (a.norm() * b.norm())) if j != i and k != i else 0.0

    total = 0.0
    for i, j, k in itertools.product(range(4), repeat=3):
        d = abs(cosine(student, i, j, k) - cosine(teacher, i, j, k))
        total += 0.5 * d**2 if d < 1 else d - 0.5
    assert float(relational_angles(student, teacher)) == pytest.approx(total / 64, rel=1e-4)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_relations_do_not_depend_on_the_size_of_features(logits, size):
    student, teacher = logits
    for distance in (relational_distances, relational_angles):
        expected = float(distance(student, teacher))
        assert float(distance(size * student, teacher)) == pytest.approx(expected, rel=1e-3)
        assert float(distance(student, size * teacher)) == pytest.approx(expected, rel=1e-3)
    images = [x.reshape(8, 5, 1, 1) for x in logits]
    assert relational_distances(*images) == relational_distances(*logits)
    assert relational_distances(student[:1], teacher[:1]) == 0  # nothing to be apart from


def test_two_equal_samples_pull_at_each_other_with_bounded_force(logits):
    student, teacher = logits[0].clone(), logits[1]
    student[1] = student[0]
    for distance in (relational_distances, relational_angles):
        leaf = student.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(distance(leaf, teacher), leaf)
        assert gradient.abs().max() < 1e6


def test_attention_is_where_channels_are_large_and_maps_of_two_sizes_meet():
    student = torch.zeros(1, 2, 2, 2)
    student[0, :, 0, 0] = torch.tensor([3.0, 4.0])  # the map is 25 at one place
    teacher = torch.zeros(1, 3, 2, 2)
    teacher[0, 0, 0, 0], teacher[0, 1, 1, 1] = 1.0, 1.0
    found = float(attention_distance(student, teacher))
    assert found == pytest.approx((1 - math.sqrt(0.5)) ** 2 + 0.5)
    larger = teacher.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert float(attention_distance(student, larger)) == pytest.approx(found)
    tall, wide = torch.rand(3, 2, 4, 3), torch.rand(3, 5, 2, 6)
    maps = [
        tall.square().sum(1).reshape(3, 2, 2, 3).mean(2),  # rows by twos
        wide.square().sum(1).reshape(3, 2, 3, 2).mean(3),  # columns by twos
    ]
    unit = [m.flatten(1) / m.flatten(1).norm(dim=1, keepdim=True) for m in maps]
    expected = float((unit[0] - unit[1]).square().sum()) / 3
    assert float(attention_distance(tall, wide)) == pytest.approx(expected, rel=1e-5)
    tokens = torch.tensor([[[3.0, 4.0], [0, 0]]])
    other = torch.tensor([[[0.0], [1.0]]])
    assert float(attention_distance(tokens, other)) == pytest.approx(2)


def test_similarity_compares_inner_products_of_a_batch():
    student = torch.tensor([[1.0, 0], [0, 1]])  # rows (1, 0), (0, 1)
    teacher = torch.tensor([[1.0], [1.0]])  # rows (1, 1) / √2
    r = math.sqrt(0.5)
    expected = 2 * ((1 - r) ** 2 + r**2) / 4
    assert float(similarity_distance(student, teacher)) == pytest.approx(expected)
    assert float(similarity_distance(student[..., None], teacher)) == pytest.approx(expected)


def test_contrast_is_the_log_chance_of_the_right_one_less_the_teachers_own():
    teacher = torch.tensor([[1.0, 0], [0, 2]])
    student = torch.tensor([[0.0, 5], [3, 0]])  # each resembles the other one's
    wrong, right = -math.log(1 / (1 + math.exp(2))), -math.log(1 / (1 + math.exp(-2)))
    found = float(Contrastive(loss="contrastive", temperature=0.5).distance(student, teacher))
    assert found == pytest.approx(wrong - right)


def test_hints_compare_channels():
    student = torch.tensor([[[[3.0]], [[4.0]]]])
    teacher = torch.tensor([[[[4.0]], [[3.0]]]])
    assert float(hint["mse"](student, teacher)) == pytest.approx(1)
    assert float(hint["cosine"](student, teacher)) == pytest.approx(0.04)
    images = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    tokens = [x.movedim(1, -1).flatten(1, 2) for x in images]
    cosines = [
        float(a @ b / (a.norm() * b.norm()))
        for a, b in zip(*(x.flatten(0, 1) for x in tokens), strict=True)
    ]
    expected = 1 - sum(cosines) / len(cosines)
    for pair in (images, tokens):
        assert float(hint["cosine"](*pair)) == pytest.approx(expected, rel=1e-4)
        mean = float((pair[0] - pair[1]).square().mean())
        assert float(hint["mse"](*pair)) == pytest.approx(mean)


def maps():
    generator = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(2, 5, 3, 4, generator=generator) for _ in range(2))
    return student, teacher, torch.randint(0, 5, (2, 3, 4), generator=generator)


def rows(x):
    """Return what is on axis 1 for each pixel, gathered one by one."""
    return torch.stack([x[n, :, i, j] for n in range(2) for i in range(3) for j in range(4)])


TERMS = {
    "dkd": Dkd(loss="dkd", temperature=2.0),
    "dist": Dist(loss="dist"),
    "kl": Kl(loss="kl"),
    "cosine": Cosine(loss="cosine"),
}


@pytest.mark.parametrize("name", TERMS)
def test_each_pixel_of_a_map_is_a_sample(name):
    student, teacher, target = maps()
    target[0, 0, 0] = -100
    whole = TERMS[name].compute(OutputPair(student, teacher, target), [])
    flat = TERMS[name].compute(OutputPair(rows(student), rows(teacher), target.flatten()), [])
    assert torch.allclose(whole, flat, atol=1e-6)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    mixed = [x.flatten(-2)[..., order].unflatten(-1, (3, 4)) for x in (student, teacher, target)]
    assert torch.allclose(TERMS[name].compute(OutputPair(*mixed), []), whole, atol=1e-6)


@pytest.mark.parametrize("name", ["dkd", "dist", "kl"])
@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_one_output_has_no_classes_to_compare(name, shape):
    with pytest.raises(StageFailed, match=rf"loss: {name} compares probabilities of classes"):
        TERMS[name].compute(OutputPair(torch.zeros(shape), torch.ones(shape), None), [])


def test_the_labels_of_a_map_are_the_tasks_loss_over_all_pixels():
    student, teacher, target = maps()
    term, said = (
        Labels(loss="labels"),
        OutputPair(student, teacher, target, targets_loss=TargetLoss().mean("cpu")),
    )
    expected = torch.nn.functional.cross_entropy(rows(student), target.flatten())
    assert torch.allclose(term.compute(said, []), expected)


def test_probabilities_as_targets_split_off_the_likeliest_class():
    student, teacher, _ = maps()
    soft = torch.randn(2, 5, 3, 4).softmax(1)
    found = TERMS["dkd"].compute(OutputPair(student, teacher, soft), [])
    assert found == TERMS["dkd"].compute(OutputPair(student, teacher, soft.argmax(1)), [])
