"""What splits hold: a hash of each sample that was read, and what of them is part of a key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from compress.common.dependency_recorder import Recording, take_recorded
from compress.data.batch import adapt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch.utils.data import Dataset

WHOLE = frozenset({"val", "test", "calibration"})
"""Splits of which every sample is hashed: what figures rest on must not change unseen."""
SAMPLED_FOR_FINGERPRINT = 2048
"""Samples hashed at most of another split that does not hold its tensors in memory."""
PIECES = 200_000
"""Hashes taken at most of a dataset that does; of a longer one each is of several samples."""


@dataclass(frozen=True)
class Contents:
    """What decides what comes out of the data."""

    made: Mapping[str, Any]
    """How samples are made, and batches of them."""
    lengths: Mapping[str, int]
    """Samples by split."""
    hashes: Mapping[str, NDArray[np.uint64]]
    """By split, two numbers for each piece that was hashed: [pieces, 2]."""

    counts: Mapping[str, int]
    """By split, how many samples were hashed."""
    cached: frozenset[str] = frozenset()
    """Splits whose samples come from a cache: what is hashed is what was read once."""

    @cached_property
    def parts(self) -> dict[str, Any]:
        """What is part of a key: how the data were made, and a digest of each split."""
        splits = {
            name: {
                "samples": self.lengths[name],
                "sha256": digest_of_hashes(hashes),
            }
            for name, hashes in self.hashes.items()
        }
        return {**self.made, "splits": splits}

    @property
    def sampled(self) -> list[str]:
        """Names of the splits of which not every sample was hashed."""
        return [name for name, count in self.counts.items() if count < self.lengths[name]]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all of it."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()


def held_tensors(dataset: Dataset[Any]) -> Sequence[torch.Tensor] | None:
    """Return the tensors that a dataset holds in memory, if it does."""
    held = getattr(dataset, "tensors", None)
    if isinstance(held, tuple | list) and all(isinstance(t, torch.Tensor) for t in held):
        return held
    return None


def indices_to_hash(split: str, samples: int) -> range:
    """Return which samples of a split that is read one by one are hashed, evenly spaced."""
    return range(0, samples, 1 if split in WHOLE else -(-samples // SAMPLED_FOR_FINGERPRINT))


def hashes_of_tensors(held: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """Return a hash of each piece of tensors in memory, [pieces, 2]; all bytes are hashed.

    A piece is one sample, or several of a long dataset.
    """
    count = max(len(tensor) for tensor in held)
    size = -(-count // PIECES)
    pieces = ([tensor[first : first + size] for tensor in held] for first in range(0, count, size))
    return as_hashes(map(_hash, pieces))


def hash_samples(samples: list[Any]) -> tuple[bytes, Recording]:
    """Hash the samples of a batch, one by one, in the process that has read them.

    Returns:
        The hashes, and where this is a worker process what user code has read there.
    """
    hashes = b"".join(_hash(_tensors(sample)) for sample in samples)
    return hashes, take_recorded() if get_worker_info() else Recording()


def as_hashes(hashes: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return hashes of 16 bytes as numbers, [hashes, 2]."""
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2)


def digest_of_hashes(hashes: NDArray[np.uint64]) -> str:
    """Return the SHA-256 over the hashes of some samples, in their order."""
    return hashlib.sha256(hashes.tobytes()).hexdigest()


def _tensors(sample: Any) -> Sequence[torch.Tensor]:
    inputs, target = adapt(sample)
    return inputs if target is None else [*inputs, target]


def _hash(tensors: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
