import random

import numpy as np
import torch

from compress.training.randomness import seeded, share_of_epoch, steps_per_epoch


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
