"""Hashes of the samples of each split, and the data's fingerprint for cache keys."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from compress.common.counts import count
from compress.common.dependency_recorder import Recording, digest_of, take_recorded
from compress.data.batch import adapt
from compress.data.own_generators import is_generator, is_user_code, reachable_objects, source_file
from compress.data.sample_facts import SplitFacts, facts_of_sample
from compress.data.targets import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch.utils.data import Dataset

    from compress.data.batch import Batch
    from compress.data.targets import Targets

HASHED_FULLY = frozenset({"val", "test", "calibration"})
"""Splits of which every sample is hashed, because the reported figures depend on them."""
SAMPLED_FOR_FINGERPRINT = 2048
"""At most as many samples are hashed of another split that does not hold its tensors in memory."""
MOST_OBJECTS = 1_000_000
"""At most as many objects that a dataset holds are hashed."""
LARGEST_ARRAY = 2**28
"""Bytes of an array up to which all of it is hashed; of larger ones evenly spaced rows."""
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
    unrepeatable: frozenset[str] = frozenset()
    """Splits of which the same sample differs each time; what their dataset holds is hashed."""
    facts: Mapping[str, SplitFacts] = field(default_factory=dict)
    """What is known of each sample that was hashed; not of splits that are unrepeatable."""
    streams: Mapping[str, str | None] = field(default_factory=dict)
    """Splits that are streams, with their own fingerprint; their first samples are hashed."""

    @cached_property
    def parts(self) -> dict[str, Any]:
        """Part of a cache key: how the data are made, and a digest of each split."""
        splits = {
            name: {"samples": self.lengths[name], "sha256": digest_of_hashes(hashes)}
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
    """Return hashes of each sample, or each few samples, of tensors in memory, [hashes, 2]."""
    count = max(len(tensor) for tensor in tensors)
    size = -(-count // PIECES)
    pieces = (
        [tensor[first : first + size] for tensor in tensors] for first in range(0, count, size)
    )
    return as_hashes(map(_hash, pieces))


def hash_samples(
    samples: list[Any], as_batch: Callable[[list[Any]], Batch] | None = None
) -> tuple[bytes, bytes, Recording]:
    """Return hashes and facts of a batch, in the process that has read it, and a worker's reads.

    A collate_fn.
    """
    hashes = facts = b""
    for sample in samples:
        if as_batch:
            batch = as_batch([sample])
            inputs, target = batch.inputs, batch.target
        else:
            inputs, target = adapt(sample)
        hashes += _hash([*inputs, *flatten(target)[0]], _structure(target))
        facts += facts_of_sample(inputs, target).tobytes()
    return hashes, facts, take_recorded() if get_worker_info() else Recording()


def hash_of_state(dataset: Any) -> bytes:
    """Hash what a dataset, or a list of samples, holds: arrays, files, settings, the user's code.

    Of files it takes name, size and date.
    """
    digest = hashlib.blake2b(digest_size=16)
    for value in islice(reachable_objects(dataset), MOST_OBJECTS):
        digest.update(_describe_held(value))
    return digest.digest()


def _describe_held(value: Any) -> bytes:
    """Return what identifies an object without its parts."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}".encode()
    if is_generator(value):
        return name
    if isinstance(value, np.ndarray | torch.Tensor) and value.dtype != object:
        step = -(-value.nbytes // LARGEST_ARRAY) if value.ndim else 0
        held = value[::step] if step > 1 else value
        about = f"{tuple(value.shape)}{value.dtype}".encode()
        if isinstance(held, torch.Tensor):
            return name + about + _hash([held])
        data = np.ascontiguousarray(held).tobytes()
        return name + about + hashlib.blake2b(data, digest_size=16).digest()
    if isinstance(value, str | Path):
        with suppress(OSError, ValueError):
            if os.sep in str(value):
                found = os.stat(value)  # noqa: PTH116
                return f"{value} {found.st_size} {found.st_mtime_ns}".encode()
        return f"{value!r}".encode()
    if isinstance(value, bool | int | float | complex | bytes | type(None)):
        return f"{value!r}".encode()
    if isinstance(value, list | tuple | dict | set | frozenset):
        return name + str(len(value)).encode()
    if isinstance(value, type | FunctionType):
        code = (digest_of(Path(source_file(value))) or "") if is_user_code(value) else ""
        return f"{value.__module__}.{value.__qualname__} {code}".encode()
    if not hasattr(value, "__dict__"):
        with suppress(Exception):  # a table, a tokenizer: whatever another library has made
            return name + pickle.dumps(value, protocol=4)
    return name


def as_hashes(hashes: Iterable[bytes]) -> NDArray[np.uint64]:
    """Return hashes of 16 bytes as two 64-bit numbers each, [hashes, 2]."""
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2)


def digest_of_hashes(hashes: NDArray[np.uint64]) -> str:
    """Return the SHA-256 over hashes of samples, in their order."""
    return hashlib.sha256(hashes.tobytes()).hexdigest()


def _structure(target: Targets | None) -> str:
    """Return what identifies the nest of a target beside its tensors; empty for one tensor."""
    return repr(flatten(target)[1]) if isinstance(target, dict | list) else ""


def _hash(tensors: Sequence[torch.Tensor], structure: str = "") -> bytes:
    count("hashed.bytes", sum(tensor.nbytes for tensor in tensors))
    digest = hashlib.blake2b(structure.encode(), digest_size=16)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
