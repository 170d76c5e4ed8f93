"""Seeds per step and rank, and the order of samples that follows from them.

Every step draws from generators seeded anew, so its randomness depends on the seed, its number and
the rank alone: a run resumed at any step equals one that was never interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.common.process import derive_seed, reseed, seeded

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["derive_seed", "reseed", "seeded", "share_of_epoch", "steps_per_epoch"]

BATCHES_PER_POOL = 50
"""Batches' worth of shuffled samples that are sorted by length together."""


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the number of whole batches, at least one."""
    return max(1, samples // batch_size)


def share_of_epoch(
    samples: int,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int,
    ranks: int,
    lengths: Sequence[int] | None = None,
) -> list[int]:
    """Return the samples that a rank sees in an epoch, in order.

    All ranks shuffle alike, and each takes every ``ranks``-th sample. Only whole batches are cut:
    every step has equal shares without padding by duplicates, the step's samples are the same for
    any number of ranks, and BatchNorm never meets a batch of one left over. With ``lengths``,
    samples of similar length come together.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    order = torch.randperm(samples, generator=generator).tolist()
    whole = steps_per_epoch(samples, batch_size) * batch_size
    used = min(whole, samples - samples % ranks)
    if lengths:
        order = bucketed(order[:used], lengths, batch_size, generator)
    return order[rank:used:ranks]


def bucketed(
    order: Sequence[int], lengths: Sequence[int], batch_size: int, generator: torch.Generator
) -> list[int]:
    """Return shuffled samples so that those of a batch have similar lengths.

    Pools of many batches are sorted by length and cut into batches, which are shuffled again; which
    samples meet still differs from epoch to epoch. An incomplete batch stays last.
    """
    pool = BATCHES_PER_POOL * batch_size
    whole = len(order) - len(order) % batch_size
    by_length = [
        sample
        for start in range(0, whole, pool)
        for sample in sorted(order[start : min(start + pool, whole)], key=lengths.__getitem__)
    ]
    batches = torch.randperm(whole // batch_size, generator=generator).tolist()
    parts = [by_length[b * batch_size : (b + 1) * batch_size] for b in batches]
    return [sample for part in (*parts, order[whole:]) for sample in part]
