"""What the losses of a training's epochs tell."""

import pytest

from compress.training.diagnosis.causes import fall_at_the_end, largest_rise


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5], 0.0),
        ([2.0, 1.5, 1.0, 0.0], 0.5),  # the last of four epochs
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 0.0], 3 / 8),  # the last two of eight
        ([2.0], 1.0),
        ([1.0, 2.0], 0.0),
    ],
)
def test_the_fall_in_the_last_quarter(losses, expected) -> None:
    assert fall_at_the_end(losses) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([2.0, 1.0, 0.5], 0.0),
        ([2.0, 1.0, 1.5, 0.0], 0.25),
        ([2.0, 1.0, 9.0, 4.0], 8.0),
        ([2.3, 2.29, 2.31], 1.0),  # never learnt anything
        ([2.0], 0.0),
    ],
)
def test_the_largest_rise(losses, expected) -> None:
    assert largest_rise(losses) == pytest.approx(expected)
