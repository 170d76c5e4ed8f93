"""How many models are trained within the time that is left."""

import math

import pytest

from pipelines.auto.recovery import models_to_begin


@pytest.mark.parametrize(
    ("epochs", "count"),
    # One epoch for each of 6, 3 more for 3, 9 more for 2 of them: 6 + 9 + 18.
    [(math.inf, 6), (33, 6), (32.9, 5), (32, 5), (31.9, 4), (19, 4), (18.9, 3), (1, 1), (0, 1)],
)
def test_a_halving_begins_with_the_models_that_can_be_trained_to_its_end(
    epochs: float, count: int
) -> None:
    assert models_to_begin(6, epochs, [1, 4, 13]) == count
