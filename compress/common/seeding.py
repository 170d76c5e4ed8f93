"""Seeds, and blocks of code whose random numbers follow from one."""

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
        reseed(seed, device)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def reseed(seed: int, device: str) -> None:
    """Seed torch, NumPy and ``random``."""
    # torch.manual_seed seeds all devices of all kinds, which takes longer than a small step.
    torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
