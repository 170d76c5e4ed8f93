"""Comparison of a divided model with the whole one."""

import math

import torch

from compress.training.model_parallel.equivalence_check import ReferenceRun


def test_tolerance_of_outputs_is_relative_to_their_finite_values() -> None:
    """An infinite masked score must not become the scale of the tolerance."""
    masked = torch.tensor([[1.0, -math.inf], [2.0, -math.inf]])
    reference = ReferenceRun((), (masked,), {}, {})
    assert reference.output_mismatch((masked,)) == ""
    for wrong in (masked + 0.1, masked.nan_to_num(neginf=-1e9), masked * math.nan):
        assert "output 0 differs" in reference.output_mismatch((wrong,))
