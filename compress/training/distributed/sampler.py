"""The order of training samples, and each rank's share of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from compress.common.process import derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHES_PER_POOL = 50
"""Batches whose samples are sorted by length together: enough for little padding, few enough that
the batches still differ from epoch to epoch."""


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the number of full batches, at least one."""
    return max(1, samples // batch_size)


def share_of_epoch(
    samples: int,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int,
    ranks: int,
    lengths: Sequence[int] | None = None,
) -> Sequence[int]:
    """Return the indices of the samples that a rank reads in an epoch, in order.

    All ranks shuffle alike, and each takes every ``ranks``-th sample, so that a step's samples are
    the same for any number of ranks. With ``lengths``, samples of similar length share a batch.
    """
    # The order depends only on seed and epoch, so that a run resumed at any step reads the samples
    # that an uninterrupted one reads.
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    # An array: 8 bytes an index, where a list of Python's integers takes 36.
    order: Sequence[int] = array(
        "q", torch.randperm(samples, generator=generator).numpy().tobytes()
    )
    # Without an incomplete last batch every step has equal shares without duplicates (torch's
    # DistributedSampler repeats samples), and BatchNorm never meets a batch of one sample.
    used = min(steps_per_epoch(samples, batch_size) * batch_size, samples - samples % ranks)
    if lengths:
        order = bucket_by_length(order[:used], lengths, batch_size, generator)
    return order[rank:used:ranks]


def bucket_by_length(
    order: Sequence[int], lengths: Sequence[int], batch_size: int, generator: torch.Generator
) -> list[int]:
    """Reorder shuffled samples so that those of a batch have similar lengths."""
    # Pools of many batches are sorted by length and cut into batches, which are shuffled again.
    pool = BATCHES_PER_POOL * batch_size
    in_batches = len(order) - len(order) % batch_size
    by_length = [
        sample
        for start in range(0, in_batches, pool)
        for sample in sorted(order[start : min(start + pool, in_batches)], key=lengths.__getitem__)
    ]
    shuffled = torch.randperm(in_batches // batch_size, generator=generator).tolist()
    batches = [by_length[b * batch_size : (b + 1) * batch_size] for b in shuffled]
    return [sample for batch in (*batches, order[in_batches:]) for sample in batch]
