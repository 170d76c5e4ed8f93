"""Summaries of outputs tell how far two models are apart, without their outputs."""

import math

import pytest
import torch

from compress.profiling.output_summary import OutputSummarizer, OutputSummary


def summary_of(output: torch.Tensor, batch: int = 32) -> OutputSummary:
    summarizer = OutputSummarizer()
    predict = summarizer.watch(lambda x: (x,))
    for part in output.split(batch):
        predict(part)
    (summary,) = summarizer.summaries()
    return summary


@pytest.mark.parametrize("shape", [(300,), (300, 1), (300, 3), (300, 5, 40)], ids=str)
@pytest.mark.parametrize("change", ["noise", "a shift", "three rows"])
def test_the_distance_is_that_of_the_outputs_whatever_the_batches(shape, change):
    torch.manual_seed(0)
    before = torch.randn(shape) + 4
    difference = 0.2 * torch.randn(shape)
    if change == "a shift":
        difference = torch.full(shape, 0.2)
    elif change == "three rows":
        difference[3:] = 0
    expected = float(difference.norm() / (before - before.mean(0)).norm())
    distance = summary_of(before).relative_distance(summary_of(before + difference, batch=7))
    # 64 numbers estimate a distance to 9 %; few rows of one number meet in fewer places.
    assert distance == pytest.approx(expected, rel=0.3)


def test_equal_outputs_have_no_distance_and_other_infinities_an_infinite_one():
    output = torch.randn(50, 4)
    masked = output.clone()
    masked[7, 1] = -math.inf
    assert summary_of(output).relative_distance(summary_of(output, batch=1)) == pytest.approx(
        0, abs=1e-9
    )
    assert summary_of(masked).relative_distance(summary_of(masked)) == 0
    assert summary_of(output).relative_distance(summary_of(masked)) == math.inf


def test_outputs_of_other_shapes_are_not_compared():
    assert summary_of(torch.ones(8, 2)).relative_distance(summary_of(torch.ones(8, 3))) is None


def test_an_output_that_hardly_varies_is_measured_by_its_norm():
    constant = torch.full((64, 3), 5.0)
    distance = summary_of(constant).relative_distance(summary_of(constant * 1.001))
    assert distance == pytest.approx(1e-3, rel=0.3)
