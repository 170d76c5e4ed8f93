"""Intervals of a metric, and of its difference between two models on the same samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from compress.core.loss import Loss
from compress.core.metric_kinds.score import Score, paired_interval, proportion_interval
from compress.core.metrics import Metric, evaluate
from compress.data.splits import Splits


def hits(*right: bool) -> Score:
    sums = np.array([right, [1] * len(right)], dtype=float)
    return Score(float(sums[0].mean()), len(right), sums)


def test_the_paired_interval_contains_0_where_mcnemar_finds_no_difference() -> None:
    for gained, lost in ((5, 0), (3, 0), (12, 2), (10, 5), (4, 4), (0, 0), (30, 15)):
        low, high = paired_interval(gained, lost, 200)
        statistic = (gained - lost) ** 2 / max(1, gained + lost)
        assert (low <= 0 <= high) == (statistic <= 3.8415), (gained, lost)
        assert paired_interval(lost, gained, 200) == (
            pytest.approx(-high, abs=1e-12),
            pytest.approx(-low, abs=1e-12),
        )


def test_the_paired_interval_covers_the_true_difference() -> None:
    random = np.random.default_rng(0)
    for lost, gained in ((0.05, 0.02), (0.02, 0.02), (0.2, 0.1)):
        drawn = random.multinomial(100, [gained, lost, 1 - gained - lost], 1000)
        ends = [paired_interval(int(g), int(x), 100) for g, x, _ in drawn]
        covered = np.mean([low <= gained - lost <= high for low, high in ends])
        assert covered == pytest.approx(0.95, abs=0.03)


def test_hits_are_compared_sample_by_sample() -> None:
    before, after = hits(*[True] * 359, False), hits(False, *[True] * 358, False)
    change = before.change_to(after)
    assert (change.samples, change.lost, change.gained) == (360, 1, 0)
    assert change.interval == paired_interval(0, 1, 360)
    assert before.uncertainty().interval == proportion_interval(359, 360)
    assert before.change_to(Score(0.5, 360)).interval is None, "no mean over samples"


def test_a_score_survives_the_store() -> None:
    score = Score(1.5, 3, np.array([[1.25, 0.5, 3.0], [1, 2, 1]]), is_exponential=True)
    stored = Score.from_json(score.to_json())
    assert stored.sums is not None and score.sums is not None
    assert np.array_equal(stored.sums, score.sums)
    assert (stored.value, stored.samples, stored.is_exponential) == (1.5, 3, True)
    assert Score.from_json(Score(0.5, 7).to_json()).sums is None


def test_intervals_of_means_are_those_of_a_bootstrap() -> None:
    random = np.random.default_rng(1)
    counts = random.integers(1, 9, 300).astype(float)
    one, other = (counts * random.exponential(size=300) for _ in range(2))
    drawn = random.integers(0, 300, (2000, 300))
    for exponential in (False, True):
        value = np.exp if exponential else np.asarray
        scores = [
            Score(float(value(s.sum() / counts.sum())), 300, np.stack([s, counts]), exponential)
            for s in (one, other)
        ]
        totals = counts[drawn].sum(1)
        means = [value(s[drawn].sum(1) / totals) for s in (one, other)]
        for found, resampled in (
            (scores[0].uncertainty().interval, means[0]),
            (scores[0].change_to(scores[1]).interval, means[1] - means[0]),
        ):
            low, high = np.quantile(resampled, (0.025, 0.975))
            assert found is not None
            assert found[1] - found[0] == pytest.approx(high - low, rel=0.12)
            assert sum(found) == pytest.approx(low + high, abs=0.1 * (high - low))


def answer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x,)


@pytest.mark.parametrize("name", ["accuracy", "loss", "perplexity", "mse"])
def test_every_mean_is_that_of_its_samples_and_ignored_labels_do_not_count(name: str) -> None:
    x = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(150).reshape(50, 3) % 4
    y[:20, 1:] = -100
    y[7:9] = -100
    loss = Loss("cross_entropy")
    if name == "mse":
        x, y = x[:, 0], x[:, 1]
    data = Splits({"val": torch.utils.data.TensorDataset(x, y)}, batch_size=16)
    score = evaluate(answer, data, "val", replace(Metric(name), loss=loss))
    assert score.samples == (50 if name == "mse" else 48) and score.sums is not None
    mean = score.sums[0].sum() / score.sums[1].sum()
    assert score.value == pytest.approx(np.exp(mean) if name == "perplexity" else mean)
    whole = replace(Metric(name), loss=loss).score(x, y)
    assert score.value == pytest.approx(whole)


def test_ignored_labels_of_several_yes_or_no_stay_beside_their_sample() -> None:
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
    y = torch.tensor([[1, -100], [-100, -100], [1, 1]])
    data = Splits({"val": torch.utils.data.TensorDataset(x, y)})
    metric = replace(Metric("accuracy"), loss=Loss("binary_cross_entropy"))
    score = evaluate(answer, data, "val", metric)
    assert score.value == pytest.approx(2 / 3) and score.samples == 2
    assert score.sums is not None and score.sums.tolist() == [[1, 1], [1, 2]]
    summed = evaluate(answer, data, "val", replace(metric, name="loss"))
    assert summed.sums is not None and summed.sums[1].tolist() == [1, 2]
