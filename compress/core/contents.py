"""What splits hold: a hash of each sample, and what is told of them in a key."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress.core.batch import adapt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch.utils.data import Dataset

SAMPLED_FOR_FINGERPRINT = 2048
"""Samples hashed at most of a dataset that does not hold its tensors in memory."""
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

    @cached_property
    def parts(self) -> dict[str, Any]:
        """What is part of a key: how the data were made, and a digest of each split."""
        splits = {
            name: {
                "samples": self.lengths[name],
                "sha256": hashlib.sha256(hashes.tobytes()).hexdigest(),
            }
            for name, hashes in self.hashes.items()
        }
        return {**self.made, "splits": splits}

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


def hashes_of(dataset: Dataset[Any]) -> NDArray[np.uint64]:
    """Return a hash of each piece of a dataset, in order: [pieces, 2].

    A piece is one sample, or several of a long dataset that holds its tensors in memory. Of one
    that does not, evenly spaced samples are hashed.
    """
    held = held_tensors(dataset)
    pieces = _samples(dataset) if held is None else _slices(held)
    return np.frombuffer(b"".join(map(_hash, pieces)), np.uint64).reshape(-1, 2)


def _samples(dataset: Dataset[Any]) -> Iterator[Sequence[torch.Tensor]]:
    count = len(dataset)  # type: ignore[arg-type]
    for index in range(0, count, -(-count // SAMPLED_FOR_FINGERPRINT)):
        inputs, target = adapt(dataset[index])
        yield inputs if target is None else [*inputs, target]


def _slices(held: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
    count = max(len(tensor) for tensor in held)
    size = -(-count // PIECES)
    for first in range(0, count, size):
        yield [tensor[first : first + size] for tensor in held]


def _hash(tensors: Sequence[torch.Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
