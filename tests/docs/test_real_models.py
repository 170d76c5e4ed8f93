"""The pure parts of benchmarks/real.py: which pixels are drawn, and what its table says."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_no_photograph_is_in_two_splits() -> None:
    from real_models.samples import split_of

    names = [f"{n}.png" for n in range(19)]
    splits = split_of(names)
    assert sorted(name for split in splits.values() for name in split) == sorted(names)
    assert {split: len(split_names) for split, split_names in splits.items()} == {
        "train": 8,
        "val": 4,
        "test": 7,
    }
    assert split_of(names[::-1]) == splits


def test_crops_are_seeded_squares_of_each_image_in_turn() -> None:
    from real_models.samples import crops

    images = [np.full((40, 60, 3), value, np.uint8) for value in (10, 200)]
    made = crops(images, 4, 16, seed=0)
    assert made.shape == (4, 16, 16, 3)
    assert [int(crop.min()) for crop in made] == [int(crop.max()) for crop in made]
    assert [int(crop[0, 0, 0]) for crop in made] == [10, 200, 10, 200]
    ramp = [np.tile(np.arange(60, dtype=np.uint8)[None, :, None], (40, 1, 3))]
    assert np.array_equal(crops(ramp, 3, 16, seed=1), crops(ramp, 3, 16, seed=1))
    assert not np.array_equal(crops(ramp, 3, 16, seed=1), crops(ramp, 3, 16, seed=2))


def test_a_tone_lies_in_its_mel_band() -> None:
    from real_models.samples import SAMPLE_RATE, mel_spectrogram

    seconds = np.arange(SAMPLE_RATE) / SAMPLE_RATE
    low, high = (mel_spectrogram(np.sin(2 * np.pi * f * seconds)) for f in (300, 3000))
    assert low.shape == (101, 40)
    assert low.mean(0).argmax() < high.mean(0).argmax()


def test_the_table_compares_with_export_and_the_best_peer() -> None:
    sys.modules.pop("real", None)
    from real import FLOAT, Row, cheapest_unjudged, machine, table
    from real_models.catalog import MODELS

    rows = [
        Row(FLOAT, cosine=1.0, size=1.0, cpu_seconds=4.0, peak_mebibytes=100),
        Row("ours", "", 0.95, 0.998, 0.26, 0.5, 0.4, 30.0, 200.0, is_ours=True),
        Row("cheap", "", 0.80, 0.98, 0.26, 0.5, 0.4, 2.0, 90.0),
        Row("good", "", 0.90, 0.99, 0.26, 0.5, 0.4, 6.0, 90.0),
        Row("absent", failed="not | installed"),
    ]
    assert cheapest_unjudged(rows) == 10
    lines = table(MODELS["lite0"], rows).splitlines()
    assert lines[0] == "### EfficientNet-Lite0"
    assert "| ours | 95.0 % | 0.9980 | 0.260 | 0.50 | 0.40 | 30.0 | 200 | 3.0 |" in lines
    assert "| absent | failed: not / installed |  |  |  |  |  |  |  |" in lines
    assert lines[2] == f"256 rows calibrate, 256 judge, 512 others are scored. {machine()}."
    assert len({line.count("|") for line in lines[4:]}) == 1


def test_cosine_is_the_mean_over_rows_and_outputs() -> None:
    from real import mean_cosine

    first, second = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    assert mean_cosine([first], [second]) == pytest.approx(1)
    assert mean_cosine([first, first], [first, -first]) == pytest.approx(0)
    assert mean_cosine([first], [torch.tensor([[0.0, 1.0], [0.0, 1.0]])]) == pytest.approx(0.5)
