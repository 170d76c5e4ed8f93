import pytest
import torch

from compress.common.errors import StageFailed
from compress.common.forward import Predictor
from compress.common.signature import Signature, TensorSpec
from compress.export.parity.compare import check_axis_sizes
from compress.export.parity.sample_parity import (
    FLOAT,
    QUANTIZED,
    OutputSums,
    Tolerance,
    check_on_samples,
)

ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
BATCHES = [(torch.randn(32, 4, generator=torch.Generator().manual_seed(i)),) for i in range(4)]


def biased(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Answer nearly the same to everything, as an untrained network does."""
    return (x + torch.tensor([100.0, 0, 0, 0]),)


def at_chance(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return biased(x.roll(1, 0))


def off_by(error: float) -> Predictor:
    return lambda x: (x * (1 + error),)


def same(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x,)


def test_answers_at_chance_beside_a_large_bias_are_caught_by_samples_alone() -> None:
    check_axis_sizes(biased, at_chance, ROWS, QUANTIZED)
    with pytest.raises(StageFailed, match=r"128 samples of `val` .* by 1\.\d of their spread"):
        check_on_samples(biased, at_chance, BATCHES, QUANTIZED)


def test_integers_may_differ_more_than_floats() -> None:
    errors = check_on_samples(same, off_by(0.1), BATCHES, QUANTIZED)
    assert (errors.samples, errors.changed) == (128, 0)
    assert errors.relative_error == pytest.approx(0.1, rel=0.02)
    with pytest.raises(StageFailed, match=r"by 0\.1 of their spread, expected at most 0\.01"):
        check_on_samples(same, off_by(0.1), BATCHES)


@pytest.mark.parametrize("tolerance", [FLOAT, QUANTIZED])
def test_at_each_size_outputs_may_differ_by_the_tolerance(tolerance: Tolerance) -> None:
    check_axis_sizes(same, off_by(0.9 * tolerance.relative), ROWS, tolerance)
    with pytest.raises(StageFailed, match="of their norm, expected at most"):
        check_axis_sizes(same, off_by(1.1 * tolerance.relative), ROWS, tolerance)


def test_a_graph_that_says_what_it_was_traced_for_is_not_called_baked_in() -> None:
    def traced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(x) == 1:
            raise RuntimeError("Runtime assertion failed for expression Ne(s0, 1) on node 'n'")
        return (x,)

    with pytest.raises(StageFailed, match=r"'batch' at size 1: .* Ne\(s0, 1\)") as caught:
        check_axis_sizes(same, traced, ROWS)
    assert "baked in" not in str(caught.value)


def test_a_small_output_at_chance_is_not_hidden_by_a_large_one() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (1000 * x, x)

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (1000 * x, x.roll(1, 0))

    with pytest.raises(StageFailed, match=r"by 1\.\d of their spread"):
        check_on_samples(both, wrong, BATCHES, QUANTIZED)


def test_a_few_samples_with_other_labels_are_caught() -> None:
    def two_classes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y[:3, 0], y[:3, 1] = y[:3].amax(1) + 0.5, y[:3].amax(1) + 0.7
        return (y,)

    def swapped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = two_classes(x)[0]
        y[:3, :2] = y[:3, :2].flip(1)
        return (y,)

    with pytest.raises(StageFailed, match=r"gives 12 other labels .* expected at most 6"):
        check_on_samples(two_classes, swapped, BATCHES, QUANTIZED)


def test_near_ties_are_no_other_labels() -> None:
    def tied(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([[1.0, 0.999, -1]]).repeat(len(x), 1),)

    def other_way(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([[0.999, 1.0, -1]]).repeat(len(x), 1),)

    assert check_on_samples(tied, other_way, BATCHES).changed == 0


def test_nan_and_one_sample_a_batch_are_judged_too() -> None:
    single = [(torch.randn(1, 4),) for _ in range(3)]
    assert check_on_samples(same, same, single).relative_error == 0
    with pytest.raises(StageFailed, match="NaN at other places"):
        check_on_samples(same, off_by(float("nan")), single, QUANTIZED)


def masked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Answer with scores of which some are masked, other ones in each sample."""
    return (x.masked_fill(x > 1, -torch.inf),)


def test_equal_infinities_are_equal_and_the_rest_is_measured() -> None:
    assert check_on_samples(masked, masked, BATCHES).relative_error == 0
    check_axis_sizes(masked, masked, ROWS)
    # Its spread is about the mean of the scores that are not masked, which is below 0.
    with pytest.raises(StageFailed, match=r"differ from the source's by 0\.11 of their spread"):
        check_on_samples(masked, lambda x: (masked(x)[0] * 1.1,), BATCHES)
    with pytest.raises(StageFailed, match=r"differ from the source's by 0\.1 of their norm"):
        check_axis_sizes(masked, lambda x: (masked(x)[0] * 1.1,), ROWS)


@pytest.mark.parametrize("other", [torch.inf, torch.nan, -1e4])
@pytest.mark.parametrize("swapped", [False, True])
def test_infinities_at_other_places_are_refused(other: float, swapped: bool) -> None:
    def elsewhere(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.masked_fill(x > 1, other),)

    pair = (elsewhere, masked) if swapped else (masked, elsewhere)
    expected = r"is infinite or NaN at other places than the source"
    with pytest.raises(StageFailed, match=rf"128 samples of `val` the exported model {expected}"):
        check_on_samples(*pair, BATCHES, QUANTIZED)
    with pytest.raises(StageFailed, match=expected):
        check_axis_sizes(*pair, ROWS, QUANTIZED)


def test_labels_are_compared_beside_masked_ones() -> None:
    def first(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([[1.0, 0.8, -1, -torch.inf]]).repeat(len(x), 1),)

    def second(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([[0.8, 1.0, -1, -torch.inf]]).repeat(len(x), 1),)

    with pytest.raises(StageFailed, match=r"gives 128 other labels"):
        check_on_samples(first, second, BATCHES, QUANTIZED)


def test_nan_in_both_is_reported_and_nan_alone_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    def undefined(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.masked_fill(x > 1, torch.nan),)

    def nothing(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * torch.nan,)

    assert check_on_samples(undefined, undefined, BATCHES).relative_error == 0
    count = sum(int((x > 1).sum()) for (x,) in BATCHES)
    assert f"{count} of the source's answers are NaN, and the exported model's too" in caplog.text
    with pytest.raises(StageFailed, match="all answers of the source are infinite or NaN"):
        check_on_samples(nothing, nothing, BATCHES)
    with pytest.raises(StageFailed, match="all answers of the source are infinite or NaN"):
        check_axis_sizes(nothing, nothing, ROWS)


def test_an_error_is_the_same_in_batches_of_any_size() -> None:
    x = torch.randn(1024, 8, generator=torch.Generator().manual_seed(0)) + 3
    found = []
    for rows in (1024, 16, 4, 2):
        sums = OutputSums()
        for part in x.split(rows):
            sums.add(part, 1.01 * part)
        found.append(sums.relative_error)
    assert found[1:] == pytest.approx(found[:1] * 3, rel=0.05)
