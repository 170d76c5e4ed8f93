"""Intervals of a metric, and of its difference between two models on the same samples."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from compress.core.metrics import Metric, evaluate
from compress.core.metrics.builtin import R2Meter
from compress.core.metrics.metric import groups_of_batch
from compress.core.metrics.score import Score, paired_interval, proportion_interval
from compress.core.objectives.loss import Loss
from compress.data.splits import Splits


def hits(*right: bool) -> Score:
    sums = np.array([right, [1] * len(right)], dtype=float)
    return Score.from_sums(float(sums[0].mean()), sums)


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
    assert before.change_to(Score(0.5, 360)).interval is None, "no sums over samples"
    assert Score(0.5, 360).uncertainty().in_words() == "360 samples; no interval"


def test_a_score_survives_the_store() -> None:
    score = replace(hits(True, False, True), outputs=())
    stored = Score.from_json(score.to_json())
    assert stored.parts is not None and stored.parts.tolist() == [1, 0, 1]
    assert (stored.value, stored.samples, stored.are_hits) == (2 / 3, 3, True)
    assert Score.from_json(Score(0.5, 7).to_json()).parts is None


def test_intervals_of_means_are_those_of_a_bootstrap() -> None:
    random = np.random.default_rng(1)
    counts = random.integers(1, 9, 300).astype(float)
    one, other = (counts * random.exponential(size=300) for _ in range(2))
    drawn = random.integers(0, 300, (2000, 300))
    for exponential in (False, True):
        value = np.exp if exponential else np.asarray
        scores = [
            Score.from_sums(
                float(value(s.sum() / counts.sum())),
                np.stack([s, counts]),
                is_exponential=exponential,
            )
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
    assert score.samples == (50 if name == "mse" else 48) and score.parts is not None
    assert score.value == pytest.approx(score.parts.mean())
    whole = replace(Metric(name), loss=loss).score(x, y)
    assert score.value == pytest.approx(whole)


def test_ignored_labels_of_several_yes_or_no_stay_beside_their_sample() -> None:
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]])
    y = torch.tensor([[1, -100], [-100, -100], [1, 1]])
    data = Splits({"val": torch.utils.data.TensorDataset(x, y)})
    metric = replace(Metric("accuracy"), loss=Loss("binary_cross_entropy"))
    score = evaluate(answer, data, "val", metric)
    assert score.value == pytest.approx(2 / 3) and score.samples == 2
    assert score.parts is not None and not score.are_hits
    assert score.parts == pytest.approx([8 / 9, 4 / 9])
    summed = evaluate(answer, data, "val", Metric("loss", loss=metric.loss))
    assert summed.parts is not None and summed.parts.mean() == pytest.approx(summed.value)


def boxes(outputs, targets):
    return float((outputs.argmax(1) == targets).float().mean())


def scored(name: str, noise: float, count: int = 600, batch_size: int = 64):
    """Return the score of a model that answers the targets with noise, and how it is computed."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=random)
    y = (x[:, :3] + torch.randn(count, 3, generator=random)).argmax(1)
    if name in ("r2", "spearman", "torchmetrics.MeanSquaredError"):
        y = x[:, 0] + torch.randn(count, generator=random) / 2
    if name == "miou":
        y = y[:, None].expand(-1, 5).clone()
        y[::3, 1:] = -100
    own = torch.Generator().manual_seed(int(100 * noise))
    scores = x + noise * torch.randn(count, 4, generator=own)

    def predict(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = scores[rows.long()]
        if y.is_floating_point():
            return (found[:, 0],)
        return (found[:, :3, None].expand(-1, -1, 5) if name == "miou" else found[:, :3],)

    places = torch.arange(count)
    data = Splits({"val": torch.utils.data.TensorDataset(places, y)}, batch_size=batch_size)
    direction = {"direction": False} if name.startswith("torchmetrics") else {}
    if ":" in name:
        direction = {"direction": True}
    metric = Metric(name, **direction)
    return evaluate(predict, data, "val", metric), lambda rows: metric.with_inferred_loss(
        data
    ).score(predict(places[rows])[0], y[rows])


@pytest.mark.parametrize(
    ("name", "groups", "rel"),
    [
        *((name, 200, 0.2) for name in ("f1", "r2", "torchmetrics.MeanSquaredError")),
        pytest.param("miou", 200, 0.2, marks=pytest.mark.soak),  # of the matrix that f1 is of
        ("spearman", 20, 0.35),  # the variance of 20 groups is known to some 30 %
    ],
)
def test_intervals_of_functions_of_samples_are_those_of_a_bootstrap(
    name: str, groups: int, rel: float
) -> None:
    (before, value), (after, other) = (scored(name, noise) for noise in (0.2, 1.0))
    assert before.parts is not None and len(before.parts) == groups
    assert before.value == pytest.approx(value(slice(None)), rel=1e-5)
    random = np.random.default_rng(2)
    drawn = [torch.from_numpy(random.integers(0, 600, 600)) for _ in range(150)]
    pairs = np.array([(value(rows), other(rows)) for rows in drawn])
    for found, resampled in (
        (before.uncertainty().interval, pairs[:, 0]),
        (before.change_to(after).interval, pairs[:, 1] - pairs[:, 0]),
    ):
        assert found is not None
        reach = 1.96 * resampled.std(ddof=1)
        assert (found[1] - found[0]) / 2 == pytest.approx(reach, rel=rel)


def test_groups_of_samples_do_not_depend_on_batches() -> None:
    (one, _), (other, _) = (scored("f1", 0.5, batch_size=size) for size in (1, 97))
    assert one.value == other.value
    assert one.parts == pytest.approx(other.parts)
    assert one.samples == 600


def test_the_users_own_metrics_say_that_they_have_no_interval() -> None:
    score, _ = scored(f"{__name__}:boxes", 0.5)
    assert score.parts is None
    assert score.change_to(score).in_words() == "600 samples; no interval"


def test_the_interval_of_boxes_is_that_of_a_mean_where_the_metric_is_one() -> None:
    # One box an image, whose overlap is right or wrong, with scores in the same order: the
    # precision of the images that are right is one, so that the mAP is their share.
    pytest.importorskip("pycocotools")
    is_found = torch.rand(400, generator=torch.Generator().manual_seed(0)) < 0.7
    box = torch.tensor([[0.0, 0.0, 10.0, 10.0]])
    shift = torch.where(is_found, 0.0, 500.0)[:, None, None]
    targets = [{"boxes": box, "labels": torch.zeros(1)} for _ in range(400)]
    outputs = [box + shift, is_found.float()[:, None], torch.zeros(400, 1)]
    meter = Metric("map", outputs=("boxes", "scores", "labels")).meter()
    for rows in (slice(0, 150), slice(150, 400)):
        meter.update([x[rows] for x in outputs], targets[rows])
    parts = meter.pseudo_values()
    assert parts is not None and len(parts) == 20
    interval = Score(meter.compute(), 400, parts).uncertainty().interval
    assert interval is not None
    half = 1.96 * (0.7 * 0.3 / 400) ** 0.5
    assert (interval[1] - interval[0]) / 2 == pytest.approx(half, rel=0.35)


def test_few_images_have_no_interval() -> None:
    meter = Metric("spearman").meter()
    meter.update(torch.arange(39.0), torch.arange(39.0))
    assert meter.pseudo_values() is None


def test_equal_models_have_no_interval_of_a_change() -> None:
    score, _ = scored("f1", 0.5)
    assert score.uncertainty().interval is not None
    assert score.change_to(score).interval is None, "no sample tells how many others would change"


def test_a_metric_that_one_group_alone_defines_has_no_interval() -> None:
    x = torch.zeros(50, 1)
    y = torch.zeros(50)
    y[7] = 1.0  # without it the targets are all equal
    data = Splits({"val": torch.utils.data.TensorDataset(x, y)})
    assert evaluate(answer, data, "val", Metric("r2")).parts is None


@pytest.mark.parametrize("samples", [1, 7, 200, 601, 1999])
def test_every_sample_is_in_one_group(samples: int) -> None:
    found: dict[int, int] = {}
    for first in range(0, samples, 32):
        rows = min(32, samples - first)
        ends = [0]
        for group, own in groups_of_batch(first, rows, samples):
            assert own.start == ends[-1] < own.stop
            ends.append(own.stop)
            found[group] = found.get(group, 0) + own.stop - own.start
        assert ends[-1] == rows
    assert [*found] == [*range(min(samples, 200))]
    assert sum(found.values()) == samples
    assert max(found.values()) - min(found.values()) <= 1


def test_a_meter_of_another_package_may_hold_what_cannot_be_copied() -> None:
    class Locked(R2Meter):
        def __init__(self, metric: Metric) -> None:
            super().__init__(metric)
            self.lock = threading.Lock()

    numbers = torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    found = []
    for meter in (Locked(Metric("r2")), Metric("r2").meter()):
        for group, rows in groups_of_batch(0, 60, 60):
            meter.update(numbers[rows] + 0.1, numbers[rows], group)
        before = meter.compute()
        found.append(meter.pseudo_values())
        assert meter.compute() == before
    assert found[0] is not None and np.array_equal(*found)
