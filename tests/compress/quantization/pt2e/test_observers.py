import copy
import math

import numpy as np
import pytest
import torch
from torchao.quantization.pt2e.fake_quantize import FakeQuantize

from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.pt2e import observers as histogram_module
from compress.quantization.pt2e import observers as observers_module
from compress.quantization.pt2e.observers import (
    HALF,
    OBSERVERS,
    EntropyObserver,
    Histogram,
    PercentileObserver,
    RangeObserver,
    SquaredErrorObserver,
)
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer

NEW = ["percentile", "entropy", "mse", "l3"]
ASYMMETRIC = {"dtype": torch.uint8, "quant_min": 0, "quant_max": 255}
SYMMETRIC = {
    "dtype": torch.int8,
    "quant_min": -127,
    "quant_max": 127,
    "qscheme": torch.per_tensor_symmetric,
}


def sample(kind: str, count: int = 50_000) -> torch.Tensor:
    rng = np.random.default_rng(0)
    drawn = {
        "normal": lambda: rng.standard_normal(count),
        "heavy": lambda: rng.standard_t(2.5, count),
        "relu": lambda: np.maximum(rng.standard_t(4, count), 0),
        "outliers": lambda: rng.standard_normal(count) * np.where(np.arange(count) % 2500, 1, 50),
        "shifted": lambda: rng.exponential(1.0, count) - 0.7,
    }[kind]()
    return torch.from_numpy(drawn.astype(np.float32))


def made(name: str, **options: object) -> RangeObserver:
    return OBSERVERS[name](eps=2.0**-60, **{**ASYMMETRIC, **options})


def rounded(x: torch.Tensor, observer: RangeObserver) -> torch.Tensor:
    scale, zero_point = observer.calculate_qparams()
    low, high = observer.quant_min, observer.quant_max
    return torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero_point), low, high)


def lost(x: torch.Tensor, observer: RangeObserver, power: int = 2) -> float:
    return float((rounded(x, observer) - x).double().abs().pow(power).mean())


def lost_within(x: torch.Tensor, low: float, high: float, observer: RangeObserver) -> float:
    scale, zero = observer._calculate_qparams(torch.tensor(low), torch.tensor(high))
    ends = observer.quant_min, observer.quant_max
    y = torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero), *ends)
    return float((y - x).double().square().mean())


@pytest.mark.parametrize("scale", [1, 1e6, 1e-36])  # the last two are binned in float64
def test_a_histogram_counts_exactly(scale: float) -> None:
    x = sample("heavy") * scale
    x[::7] = 0
    histogram = Histogram()
    for part in x.split(3333):
        histogram.add_(part)
    expected, _ = np.histogram(x[x != 0].double().numpy(), histogram.edges().numpy())
    assert histogram.counts.tolist() == expected.tolist()
    assert int(histogram.zeros) == len(x[::7])
    assert histogram.total == len(x)
    outer = HALF * histogram.width
    assert outer / 2 <= float(x.abs().max()) < outer


def test_a_histogram_is_the_same_in_any_order_and_batches() -> None:
    x = sample("heavy") * 1e-6
    x[5] = 1e20
    one, other = Histogram(), Histogram()
    one.add_(x)
    for part in x.flip(0).split(100):
        other.add_(part)
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def test_a_histogram_counts_beyond_what_float32_does() -> None:
    histogram = Histogram()
    ones = torch.ones(1000)
    histogram.add_(ones)
    histogram.counts *= 2**24
    histogram.add_(ones)
    assert histogram.total == 1000 * 2**24 + 1000


@pytest.mark.parametrize("kind", ["normal", "heavy", "relu", "shifted"])
def test_shares_below_are_those_of_the_values(kind: str) -> None:
    x = sample(kind)
    histogram = Histogram()
    histogram.add_(x)
    at = x.quantile(torch.tensor([0.01, 0.9, 0.999])) + 1e-6
    expected = torch.tensor([int((x < value).sum()) for value in at])
    found = histogram.count_below(at)
    assert (found - expected).abs().max() < 0.005 * len(x)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Histogram:
    """Return a histogram of eight bins that are 0.5 wide, with 11 values."""
    monkeypatch.setattr(histogram_module, "HALF", 4)
    values = torch.tensor([-1.9, -1.8, -1.75, -0.1, 0, 0, 0, 0.2, 0.6, 0.7, 1.6])
    histogram = Histogram()
    histogram.add_(values)
    assert histogram.counts.tolist() == [3, 0, 0, 1, 1, 2, 0, 1]
    return histogram


def test_values_lie_evenly_spread_within_their_bins(few: Histogram) -> None:
    at = torch.tensor([-9, -2, -1.8, -1.2, -0.25, -1e-9, 0, 1e-9, 0.1, 0.8, 1.4, 1.5, 1.8, 2, 9])
    at = at.double()
    upto = np.concatenate([[0], few.counts.cumsum(0)])
    expected = np.interp(at, np.linspace(-2, 2, 9), upto) + 3 * (at.numpy() > 0)
    assert few.count_below(at).tolist() == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize("low", [0.0, 1e-9, 0.1, 3 / 11, 0.3, 0.4])
@pytest.mark.parametrize("high", [0.5, 0.7, 10 / 11, 0.95, 1 - 1e-9, 1.0])
def test_quantiles_are_the_innermost_values(few: Histogram, low: float, high: float) -> None:
    """As many values as asked for lie beyond; of a gap between values the inner end is taken."""
    counts = [3, 0, 0, 1, 4, 2, 0, 1]  # zeros go with what lies above them
    edges, upto = np.linspace(-2, 2, 9), np.concatenate([[0], np.cumsum(counts)])
    last = max(b for b in range(8) if upto[b] <= low * 11 and counts[b])
    first = min(b for b in range(8) if upto[b + 1] >= high * 11 and counts[b])
    expected = [
        edges[b] + 0.5 * (s * 11 - upto[b]) / counts[b] for b, s in ((last, low), (first, high))
    ]
    found = [float(value) for value in few.quantiles(low, high)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("kind", ["normal", "heavy", "relu", "shifted"])
@pytest.mark.parametrize("percentile", [90, 99.9])
def test_a_percentile_is_that_of_the_values(kind: str, percentile: float) -> None:
    x = sample(kind)
    observer = PercentileObserver(percentile, **ASYMMETRIC)
    for part in x.split(10_000):
        observer(part)
    cut = (100 - percentile) / 200 * len(x)
    low, high = observer.choose_range()
    in_bin = int(((x - high).abs() <= observer.histogram.width).sum())
    assert abs(int((x > high).sum()) - cut) <= 1 + in_bin < 0.02 * len(x)
    if kind != "relu":  # half of which is zero
        in_bin = int(((x - low).abs() <= observer.histogram.width).sum())
        assert abs(int((x < low).sum()) - cut) <= 1 + in_bin < 0.02 * len(x)


@pytest.mark.parametrize("kind", ["normal", "heavy", "relu", "shifted"])
@pytest.mark.parametrize("bits", [8, 4])
def test_least_squared_error_is_that_of_a_fine_search(kind: str, bits: int) -> None:
    x = sample(kind, 10_000)
    observer = SquaredErrorObserver(dtype=torch.uint8, quant_min=0, quant_max=2**bits - 1)
    for part in x.split(3000):
        observer(part)
    low, high = float(x.min()), float(x.max())
    grid = np.geomspace(0.03, 1, 35)
    best = min(
        lost_within(x, a * min(low, 0), b * high, observer)
        for a in (grid if low < 0 else [1])
        for b in grid
    )
    assert lost(x, observer) < 1.02 * best
    minmax = lost_within(x, low, high, observer)
    if (kind, bits) == ("heavy", 4):
        assert best < 0.5 * minmax, "keeping the extremes would not do"


def test_the_modelled_error_is_that_of_the_values() -> None:
    x = sample("relu")
    observer = made("mse")
    observer(x)
    highs = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64) * x.max()
    modelled = observer.error(torch.zeros(3, dtype=torch.float64), highs) / len(x)
    found = [lost_within(x, 0.0, float(high), observer) for high in highs]
    assert modelled.tolist() == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize("options", [ASYMMETRIC, SYMMETRIC, ASYMMETRIC | {"quant_max": 15}])
def test_the_modelled_error_is_the_integral_over_bins(options: dict) -> None:
    """Midpoints of 400 parts of each bin, in which values lie evenly spread."""
    observer = made("mse", **options)
    observer(torch.tensor([-0.8, -0.3, -0.3, 0.0, 0.1, 0.45, 0.9, 0.95]))
    low, high = torch.tensor([-0.8, -0.5, 0.0]).double(), torch.tensor([0.95, 0.3, 0.9]).double()
    expected = []
    for a, b in zip(low, high, strict=True):
        scale, zero = observer._calculate_qparams(a.float(), b.float())
        ends = (
            (observer.quant_min - zero) * scale.double(),
            (observer.quant_max - zero) * scale.double(),
        )
        total = 0.0
        for bin_, count in enumerate(observer.histogram.counts.tolist()):
            if count:
                edge, width = float(observer.histogram.edges()[bin_]), observer.histogram.width
                x = edge + width * (torch.arange(400).double() + 0.5) / 400
                nearest = ((x / scale).round() * scale).clamp(*ends)
                total += count * float((x - nearest).square().mean())
        expected.append(total)
    assert observer.error(low, high).tolist() == pytest.approx(expected, rel=1e-3)


def test_cubes_of_errors_clip_less_than_squares() -> None:
    x = sample("heavy", 10_000)
    squares, cubes = made("mse", quant_max=15), made("l3", quant_max=15)
    squares(x)
    cubes(x)
    assert lost(x, squares) < 0.9 * lost(x, cubes)
    assert lost(x, cubes, 3) < 0.9 * lost(x, squares, 3)
    scales = [float(observer.calculate_qparams()[0]) for observer in (squares, cubes)]
    assert scales[0] < 0.9 * scales[1]
    chosen = [end.double()[None] for end in cubes.choose_range()]
    assert float(cubes.error(*chosen)) / len(x) == pytest.approx(lost(x, cubes, 3), rel=0.01)


def test_symmetric_ranges_are_searched_too() -> None:
    x = sample("heavy", 10_000)
    observer = made("mse", **SYMMETRIC)
    observer(x)
    grid = np.geomspace(0.01, 1, 150) * float(x.abs().max())
    best = min(lost_within(x, -float(t), float(t), observer) for t in grid)
    assert lost(x, observer) < 1.02 * best
    assert int(observer.calculate_qparams()[1]) == 0


def naive_entropy(x: np.ndarray, levels: int, width: float) -> float:
    """Return Migacz's threshold for values above zero, written out."""
    counts = np.bincount((x[x > 0] / width).astype(int)).astype(float)
    found = []
    for t in [*range(levels, len(counts), 32), len(counts)]:
        p = counts[:t].copy()
        p[-1] += counts[t:].sum()
        q = np.zeros(t)
        for level in range(levels):
            cell = slice(math.ceil(level * t / levels), math.ceil((level + 1) * t / levels))
            used = counts[cell] > 0
            if used.any():
                q[cell] = used * counts[cell].sum() / used.sum()
        p, q = p / p.sum(), q / q.sum()
        bad = (p > 0) & (q == 0)
        some = p > 0
        with np.errstate(divide="ignore"):
            kl = np.inf if bad.any() else float((p[some] * np.log(p[some] / q[some])).sum())
        found.append((kl, t))
    return min(found)[1] * width


def test_entropy_matches_a_naive_implementation() -> None:
    x = sample("outliers").clamp(min=0)
    observer = EntropyObserver(**ASYMMETRIC)
    for part in x.split(10_000):
        observer(part)
    low, high = observer.choose_range()
    assert float(low) == 0
    assert float(high) == naive_entropy(x.double().numpy(), 256, observer.histogram.width)
    assert float(high) < 0.2 * float(x.max())


def written_out(x: np.ndarray, observer: RangeObserver, symmetric: bool) -> list[float]:
    """Return the range of least divergence, its ends equally far from zero, within the values'."""
    width, levels = observer.histogram.width, observer.quant_max - observer.quant_min + 1
    bins = np.floor(x[x != 0] / width).astype(int)
    lowest, highest = min(bins.min(), 0), max(bins.max(), -1) + 1
    if symmetric:
        lowest, highest = min(lowest, -highest), max(highest, -lowest)
    reach = max(-lowest, highest)
    start = min(reach, levels if 0 in (lowest, highest) else levels // 2)
    found = []
    for r in [*range(start, reach, 32), reach]:
        a, b = max(lowest, -r), min(highest, r)
        p = np.array([(bins == i).sum() for i in range(a, b)], dtype=float)
        level = np.arange(b - a) * levels // (b - a)
        cells = [p[(level == own) & (p > 0)] for own in level]
        q = np.array([cell.mean() if n else 0 for cell, n in zip(cells, p, strict=True)])
        p[0] += (bins < a).sum()
        p[-1] += (bins >= b).sum()
        p, q = p / p.sum(), q / max(q.sum(), 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            kl = np.where(p > 0, p * np.log(p / q), 0).sum()
        found.append((kl, a, b))
    _, a, b = min(found)
    return [a * width, b * width]


@pytest.mark.parametrize("kind", ["normal", "shifted", "below", "narrow"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_entropy_matches_a_naive_implementation_on_both_sides_of_zero(
    monkeypatch: pytest.MonkeyPatch, kind: str, symmetric: bool
) -> None:
    for module in (histogram_module, observers_module):
        monkeypatch.setattr(module, "HALF", 256)
    drawn = {"below": lambda: -sample("relu", 500), "narrow": lambda: sample("normal", 500) / 9 + 1}
    x = drawn.get(kind, lambda: sample(kind, 500))()
    few = (
        SYMMETRIC | {"quant_min": -4, "quant_max": 3}
        if symmetric
        else ASYMMETRIC | {"quant_max": 7}
    )
    observer = EntropyObserver(**few)
    observer(x)
    found = [float(end) for end in observer.choose_range()]
    assert found == written_out(x.double().numpy(), observer, symmetric)


def test_entropy_reaches_equally_far_to_both_sides() -> None:
    x = sample("outliers")
    observer = EntropyObserver(**ASYMMETRIC)
    observer(x)
    low, high = observer.choose_range()
    assert -float(low) == float(high) < 0.2 * float(x.abs().max())
    shifted = EntropyObserver(**ASYMMETRIC)
    shifted(sample("shifted"))
    scale, zero_point = shifted.calculate_qparams()
    assert float(scale * zero_point) == pytest.approx(0.7, abs=float(scale)), "no value is lower"


@pytest.mark.parametrize("name", NEW)
def test_sixteen_bits_are_finer_than_eight(name: str) -> None:
    x = sample("normal")
    eight, sixteen = made(name), made(name, dtype=torch.uint16, quant_max=2**16 - 1)
    eight(x)
    sixteen(x)
    assert float(sixteen.calculate_qparams()[0]) < float(eight.calculate_qparams()[0]) / 100


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_a_constant_is_kept(name: str, value: float) -> None:
    observer = made(name)
    observer(torch.full((100,), value))
    assert lost(torch.full((1,), value), observer) < 1e-6


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_ranges_follow_the_scale(name: str, scale: float) -> None:
    x = sample("heavy", 20_000)
    one, other = made(name), made(name)
    one(x)
    other(x * scale)
    ratio = float(other.calculate_qparams()[0] / one.calculate_qparams()[0])
    assert ratio == pytest.approx(scale, rel=0.05)


@pytest.mark.parametrize("name", NEW)
def test_an_observer_serves_fake_quantization_and_its_checkpoint(name: str) -> None:
    x = sample("heavy", 20_000)
    fake = FakeQuantize(observer=OBSERVERS[name], eps=2.0**-60, **ASYMMETRIC)
    fake(x[:10_000])
    y = fake(x[10_000:])
    observer = made(name)
    observer(x)
    assert torch.equal(y, rounded(x[10_000:], observer))
    other = FakeQuantize(observer=OBSERVERS[name], eps=2.0**-60, **ASYMMETRIC)
    other(x * 100)
    other.load_state_dict(copy.deepcopy(fake.state_dict()))
    assert torch.equal(other.calculate_qparams()[0], fake.calculate_qparams()[0])


@pytest.mark.parametrize("name", NEW)
def test_an_observers_memory_does_not_grow(name: str) -> None:
    observer = made(name)
    observer(torch.zeros(0))
    empty = {key: value.shape for key, value in observer.state_dict().items()}
    for step in range(3):
        observer(torch.randn(1000) * 10**step)
    assert {key: value.shape for key, value in observer.state_dict().items()} == empty


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_quantizer_creates_the_chosen_observer(name: str) -> None:
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), name, percentile=99.5)
    observer = quantizer.activation.observer_or_fake_quant_ctr()
    assert type(observer) is OBSERVERS[name]
    assert getattr(observer, "percentile", 99.5) == 99.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NEW)
def test_a_gpu_finds_the_same_range(name: str) -> None:
    x = sample("heavy")
    here, there = made(name), made(name).cuda()
    for part in x.split(10_000):
        here(part)
        there(part.cuda())
    assert torch.equal(there.histogram.counts.cpu(), here.histogram.counts)
    scale, zero_point = there.calculate_qparams()
    assert float(scale) == pytest.approx(float(here.calculate_qparams()[0]), rel=1e-6)
    assert int(zero_point) == int(here.calculate_qparams()[1])
