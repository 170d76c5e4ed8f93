"""Rows that a loader's sampler chooses."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from compress.common.errors import PipelineInvalid
from compress.functional.in_memory import make_splits

DATA = TensorDataset(torch.arange(20.0)[:, None], torch.arange(20))


def rows(loader: DataLoader) -> list[int]:
    splits = make_splits(train=loader)
    return [int(y) for batch in splits.batches("train") for y in batch.target]


def test_the_rows_that_a_sampler_chooses_are_those_that_are_read() -> None:
    chosen = [3, 7, 1, 12]
    assert rows(DataLoader(DATA, sampler=SubsetRandomSampler(chosen))) == sorted(chosen)
    batches = BatchSampler(SubsetRandomSampler(chosen), 2, drop_last=False)
    assert rows(DataLoader(DATA, batch_sampler=batches)) == sorted(chosen)
    assert rows(DataLoader(DATA, batch_sampler=[[3, 7], [1, 12]])) == sorted(chosen)
    for loader in (DataLoader(DATA), DataLoader(DATA, shuffle=True)):
        assert rows(loader) == list(range(20))


@pytest.mark.parametrize(
    ("sampler", "reason"),
    [
        (WeightedRandomSampler([1.0] * 20, 20), "draws rows more than once"),
        (RandomSampler(DATA, replacement=True), "draws rows more than once"),
        (DistributedSampler(DATA, 2, 0), "divides the rows among processes"),
    ],
)
def test_samplers_that_choose_otherwise_are_refused(sampler, reason: str) -> None:
    with pytest.raises(PipelineInvalid, match=f"{type(sampler).__name__} {reason}"):
        make_splits(train=DataLoader(DATA, sampler=sampler))
