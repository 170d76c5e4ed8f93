"""Seeds per epoch and rank, and the order of samples that follows from them.

Every epoch draws from generators seeded anew, so an epoch's randomness depends on the seed and its
number alone: a run resumed at an epoch's start equals one that was never interrupted.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def derive_seed(*parts: int) -> int:
    """Return 32 bits that differ for different numbers."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little")


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` for a block, and put them back as they were after it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the number of whole batches, at least one."""
    return max(1, samples // batch_size)


def share_of_epoch(
    samples: int, batch_size: int, seed: int, epoch: int, rank: int, ranks: int
) -> list[int]:
    """Return the samples that a rank sees in an epoch, in order.

    All ranks shuffle alike, and each takes every ``ranks``-th sample. Only whole batches are cut:
    every step has equal shares without padding by duplicates, the step's samples are the same for
    any number of ranks, and BatchNorm never meets a batch of one left over.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    order = torch.randperm(samples, generator=generator).tolist()
    whole = steps_per_epoch(samples, batch_size) * batch_size
    used = min(whole, samples - samples % ranks)
    return order[rank:used:ranks]
