"""A part of a split stands for all of it, whatever the order of its samples."""

from itertools import pairwise

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.data.dataloader import spread_indices
from compress.data.splits import Splits


@pytest.mark.parametrize("available", [128, 129, 300, 5000])
def test_one_sample_of_each_equal_stretch_is_taken(available: int) -> None:
    indices = list(spread_indices(available, 128))
    assert len({*indices}) == 128
    assert all(i * available // 128 <= index for i, index in enumerate(indices))
    assert all(a < b for a, b in pairwise([*indices, available]))
    assert indices == list(spread_indices(available, 128))


def test_a_split_with_few_samples_is_taken_whole() -> None:
    assert list(spread_indices(5, 128)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("period", [10, 150], ids=["classes in turn", "sorted by class"])
def test_a_limit_takes_samples_of_every_class(period: int) -> None:
    labels = torch.arange(300) // (30 if period == 150 else 1) % 10
    splits = Splits({"val": TensorDataset(torch.zeros(300, 1), labels)})
    batches = list(splits.batches("val", 16, limit=60))
    found = torch.cat([batch.target for batch in batches if isinstance(batch.target, torch.Tensor)])
    assert len(found) == 60
    assert {*found.tolist()} == {*range(10)}
