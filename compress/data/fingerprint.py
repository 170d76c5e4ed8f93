"""Hashes of the samples of each split, and the data's fingerprint for cache keys."""

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

HASHED_FULLY = frozenset({"val", "test", "calibration"})
"""Splits of which every sample is hashed, because the reported figures depend on them."""
SAMPLED_FOR_FINGERPRINT = 2048
"""At most as many samples are hashed of another split that does not hold its tensors in memory."""
PIECES = 200_000
"""At most as many hashes of a dataset in memory; in longer ones each covers several samples."""


@dataclass(frozen=True)
class Contents:
    """What the data depend on: how samples are made, and hashes of them."""

    made: Mapping[str, Any]
    """How samples are made, and batches of them."""
    lengths: Mapping[str, int]
    """Samples by split."""
    hashes: Mapping[str, NDArray[np.uint64]]
    """By split, two 64-bit halves of each hash: [hashes, 2]."""

    counts: Mapping[str, int]
    """By split, how many samples were hashed."""
    cached: frozenset[str] = frozenset()
    """Splits whose samples come from the sample cache, as they were when they were first read."""

    @cached_property
    def parts(self) -> dict[str, Any]:
        """Part of a cache key: how the data are made, and a digest of each split."""
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
        """SHA-256 of :attr:`parts`."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()


def in_memory_tensors(dataset: Dataset[Any]) -> Sequence[torch.Tensor] | None:
    """Return the tensors of a dataset in memory, such as a TensorDataset; None for others."""
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple | list) and all(isinstance(t, torch.Tensor) for t in tensors):
        return tensors
    return None


def indices_to_hash(split: str, samples: int) -> range:
    """Return the indices of the samples to hash in a split that is read sample by sample."""
    return range(0, samples, 1 if split in HASHED_FULLY else -(-samples // SAMPLED_FOR_FINGERPRINT))


def hashes_of_tensors(tensors: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """Return hashes over all bytes of tensors in memory, [hashes, 2].

    One for each sample, or for each few samples of a long dataset.
    """
    count = max(len(tensor) for tensor in tensors)
    size = -(-count // PIECES)
    pieces = (
        [tensor[first : first + size] for tensor in tensors] for first in range(0, count, size)
    )
    return as_hashes(map(_hash, pieces))


def hash_samples(samples: list[Any]) -> tuple[bytes, Recording]:
    """Hash the samples of a batch in the process that has read them; a ``collate_fn``.

    Returns:
        The hashes, and in a worker process the reads of user code there.
    """
    hashes = b"".join(_hash(_tensors(sample)) for sample in samples)
    return hashes, take_recorded() if get_worker_info() else Recording()


def as_hashes(hashes: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return hashes of 16 bytes as two 64-bit numbers each, [hashes, 2]."""
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2)


def digest_of_hashes(hashes: NDArray[np.uint64]) -> str:
    """Return the SHA-256 over hashes of samples, in their order."""
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
