import random

import numpy as np
import torch

from compress.common.process import seeded
from compress.training.distributed.base import bucket_by_length, share_of_epoch, steps_per_epoch


def shares(samples, batch, ranks, epoch=1):
    return [share_of_epoch(samples, batch, 0, epoch, rank, ranks) for rank in range(ranks)]


def test_ranks_share_whole_batches_without_duplicates():
    parts = shares(103, 20, ranks=4)
    assert [len(part) for part in parts] == [25] * 4
    seen = [index for part in parts for index in part]
    assert len(set(seen)) == len(seen) == steps_per_epoch(103, 20) * 20


def test_each_step_sees_the_same_samples_for_any_number_of_ranks():
    (alone,) = shares(103, 20, ranks=1)
    parts = shares(103, 20, ranks=4)
    for step in range(5):
        together = {index for part in parts for index in part[step * 5 : step * 5 + 5]}
        assert together == set(alone[step * 20 : step * 20 + 20])


def test_epochs_differ_and_repeat():
    assert shares(50, 10, 1, epoch=1) != shares(50, 10, 1, epoch=2)
    assert shares(50, 10, 1, epoch=2) == shares(50, 10, 1, epoch=2)


def test_fewer_samples_than_a_batch_are_one_step_of_equal_shares():
    assert steps_per_epoch(7, 64) == 1
    assert [len(part) for part in shares(7, 64, ranks=2)] == [3, 3]


def test_a_seeded_block_repeats_and_leaves_the_generators_alone():
    def draw():
        return float(torch.rand(())), random.random(), float(np.random.rand())

    def inside(seed):
        with seeded(seed, "cpu"):
            return draw()

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = draw()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    first = inside(5)
    assert draw() == expected
    assert inside(5) == first != inside(6)


def padding(order, lengths, batch):
    parts = [order[start : start + batch] for start in range(0, len(order), batch)]
    padded = sum(max(lengths[i] for i in part) * len(part) for part in parts)
    return 1 - sum(lengths[i] for i in order) / padded


def test_batches_of_similar_length_waste_less_padding():
    lengths = torch.randint(1, 129, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    (random_order,) = [share_of_epoch(2000, 16, 0, 1, 0, 1)]
    (by_length,) = [share_of_epoch(2000, 16, 0, 1, 0, 1, lengths)]
    assert sorted(by_length) == sorted(random_order)
    assert padding(random_order, lengths, 16) > 0.4
    assert padding(by_length, lengths, 16) < 0.05
    assert by_length != share_of_epoch(2000, 16, 0, 2, 0, 1, lengths)


def test_ranks_share_batches_of_similar_length():
    lengths = [index % 10 + 1 for index in range(200)]
    (alone,) = [share_of_epoch(200, 20, 0, 1, 0, 1, lengths)]
    parts = [share_of_epoch(200, 20, 0, 1, rank, 2, lengths) for rank in range(2)]
    for step in range(10):
        together = {i for part in parts for i in part[step * 10 : step * 10 + 10]}
        assert together == set(alone[step * 20 : step * 20 + 20])


def test_an_incomplete_batch_stays_last():
    order = bucket_by_length(range(7), [9, 1, 8, 2, 7, 3, 6], 3, torch.Generator().manual_seed(0))
    assert sorted(order) == list(range(7)) and order[-1] == 6
    batches = {frozenset(order[:3]), frozenset(order[3:6])}
    assert batches == {frozenset({1, 3, 5}), frozenset({0, 2, 4})}
