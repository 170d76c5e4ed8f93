"""Terms of a loss: what they weigh, which pairs they take, and what they compare."""

import pytest
import torch
from pydantic import ValidationError

from compress.distillation import losses
from compress.distillation.terms import (
    Attention,
    Contrastive,
    Hint,
    Relational,
    Similarity,
)

PAIRS = [(torch.randn(6, 4, generator=torch.manual_seed(i)), torch.randn(6, 4)) for i in range(3)]


def mean(distance) -> torch.Tensor:
    return sum(distance(student, teacher) for student, teacher in PAIRS) / 3


@pytest.mark.parametrize(
    ("term", "distance"),
    [
        (Hint(loss="hint", student="a"), torch.nn.functional.mse_loss),
        (
            Hint(loss="hint", student="a", compare="cosine"),
            lambda s, t: losses.hint_distance(s, t, "cosine"),
        ),
        (Similarity(loss="similarity"), losses.similarity_distance),
        (
            Contrastive(loss="contrastive", temperature=0.3),
            lambda s, t: losses.contrastive_distance(s, t, 0.3),
        ),
        (
            Relational(loss="relational"),
            lambda s, t: losses.relational_distances(s, t) + 2 * losses.relational_angles(s, t),
        ),
        (
            Relational(loss="relational", distance_weight=3, angle_weight=0),
            lambda s, t: 3 * losses.relational_distances(s, t),
        ),
    ],
)
def test_a_term_is_the_mean_of_its_pairs(term, distance) -> None:
    torch.testing.assert_close(term.compute(None, PAIRS), mean(distance))
    torch.testing.assert_close(term.compute(None, PAIRS[:1]), distance(*PAIRS[0]))


def test_attention_is_compared_as_maps() -> None:
    images = torch.rand(2, 3, 4, 4), torch.rand(2, 5, 2, 2)
    found = Attention(loss="attention", student="a").compute(None, [images])
    torch.testing.assert_close(found, losses.attention_distance(*images))


@pytest.mark.parametrize(
    ("student", "teacher", "comparable"),
    [
        ((2, 3, 4, 4), (2, 5, 8, 8), True),
        ((2, 6, 3), (2, 6, 5), True),
        ((2, 6, 3), (2, 7, 3), False),
        ((2, 6, 3), (2, 6, 3, 1), False),
        ((2, 6, 3, 1), (2, 6, 3), False),
        ((2, 6), (2, 6), False),
        ((2, 3, 4, 4, 4), (2, 3, 4, 4, 4), False),
    ],
)
def test_maps_of_attention_need_positions(student, teacher, comparable) -> None:
    term = Attention(loss="attention", student="a")
    assert term.compares(torch.Size(student), torch.Size(teacher)) is comparable


def test_projected_features_need_one_shape_and_relations_none() -> None:
    one, other = torch.Size((2, 3)), torch.Size((2, 4))
    for term in (Hint(loss="hint"), Contrastive(loss="contrastive")):
        assert term.compares(one, one) and not term.compares(one, other)
        assert term.projects == "auto"
    assert Hint(loss="hint", projection="none").projects == "none"
    assert Similarity(loss="similarity").compares(one, other)
    assert Similarity(loss="similarity").projects == "none"


def test_a_teachers_modules_are_by_default_the_students() -> None:
    assert Hint(loss="hint").modules is None
    assert Hint(loss="hint", student="a").modules == ("a", "a")
    assert Hint(loss="hint", student="a", teacher="b").modules == ("a", "b")
    with pytest.raises(ValidationError, match="teacher names modules and student names none"):
        Hint(loss="hint", teacher="b")
