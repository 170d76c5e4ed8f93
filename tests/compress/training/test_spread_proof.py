"""What a model that is spread over processes is held against."""

import math

import torch

from compress.training.model_parallel.equivalence_check import ReferenceRun


def test_a_spread_model_is_held_against_what_is_finite_of_the_whole_one() -> None:
    """A masked score's size must not become the size that differences are allowed by."""
    masked = torch.tensor([[1.0, -math.inf], [2.0, -math.inf]])
    proof = ReferenceRun((), (masked,), {}, {})
    assert proof.output_mismatch((masked,)) == ""
    for wrong in (masked + 0.1, masked.nan_to_num(neginf=-1e9), masked * math.nan):
        assert "output 0 differs" in proof.output_mismatch((wrong,))
