"""Raw and scaled pixels are told apart by their ranges, and brought to the same one."""

import pytest
import torch

from compress.core.diagnosis.layer_diagnosis import input_ranges, unlikeness, with_ranges
from compress.data.batch import Batch

IMAGES = torch.randn(64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(64)[:, None]


def ranges(*inputs: torch.Tensor):
    halves = zip(*(values.split(32) for values in inputs), strict=True)
    return input_ranges(Batch(parts, None) for parts in halves)


def test_equal_samples_are_alike_and_tokens_have_no_range() -> None:
    found = ranges(IMAGES, TOKENS)
    assert found[1] is None
    assert found[0].mean == pytest.approx(float(IMAGES.mean()), abs=1e-6)
    assert found[0].deviation == pytest.approx(float(IMAGES.std(correction=0)), rel=1e-6)
    assert unlikeness(found, found) == 1


@pytest.mark.parametrize(
    ("scale", "shift", "expected"), [(8.0, 0.0, 8), (0.125, 0.0, 8), (1.0, 3.0, 4)]
)
def test_wider_narrower_and_shifted_samples_are_unlike(scale, shift, expected) -> None:
    val, other = ranges(IMAGES), ranges(scale * IMAGES + shift)
    assert unlikeness(other, val) == pytest.approx(expected, rel=0.03)


def test_a_sample_is_brought_to_the_range_of_another() -> None:
    raw = 8 * (IMAGES + 1)
    (scaled, tokens) = with_ranges(
        Batch((raw, TOKENS), None), ranges(raw, TOKENS), ranges(IMAGES, TOKENS)
    ).inputs
    torch.testing.assert_close(scaled, IMAGES, rtol=1e-4, atol=1e-5)
    assert tokens is TOKENS
