"""Terms of a loss: what they weigh, which pairs they take, and what they compare."""

import pytest
import torch
from pydantic import ValidationError

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
    "term",
    [
        Hint(loss="hint", student="a"),
        Similarity(loss="similarity"),
        Contrastive(loss="contrastive", temperature=0.3),
        Relational(loss="relational"),
    ],
)
def test_a_term_is_the_mean_of_its_pairs(term) -> None:
    torch.testing.assert_close(term.compute(None, PAIRS), mean(term.distance))
    torch.testing.assert_close(term.compute(None, PAIRS[:1]), term.distance(*PAIRS[0]))


def test_relations_are_the_weighted_sum_of_distances_and_angles() -> None:
    def distance(apart: float, turned: float) -> torch.Tensor:
        term = Relational(loss="relational", distance_weight=apart, angle_weight=turned)
        return term.distance(*PAIRS[0])

    torch.testing.assert_close(distance(3, 0), 3 * distance(1, 0))
    torch.testing.assert_close(distance(1, 2), distance(1, 0) + 2 * distance(0, 1))
    usual = Relational(loss="relational").distance(*PAIRS[0])
    torch.testing.assert_close(usual, distance(1, 2))


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
