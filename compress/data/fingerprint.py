"""Hashes and facts of the samples of each split, and the data's fingerprint for cache keys."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from compress.common.counts import count
from compress.common.dependency_recorder import Recording, digest_of, take_recorded
from compress.common.errors import PipelineInvalid
from compress.common.forward import bytes_of
from compress.data.batch import IGNORED_LABEL, Batch, adapt
from compress.data.own_generators import is_generator, is_user_code, reachable_objects, source_file
from compress.data.targets import flatten

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tensors: TypeAlias = Sequence[torch.Tensor]
HASHED_FULLY = frozenset({"val", "test", "calibration"})
"""Splits of which every sample is hashed, because the reported figures depend on them."""
SAMPLED_FOR_FINGERPRINT = 2048
"""At most as many samples are hashed of another split that does not hold its tensors in memory."""
MOST_OBJECTS = 1_000_000  # at most as many objects that a dataset holds are hashed
LARGEST_ARRAY = 2**28
"""Bytes of an array up to which all of it is hashed; of larger ones evenly spaced rows."""
PIECES = 200_000
"""At most as many hashes of a dataset in memory; in longer ones each covers several samples."""
FACTS = np.dtype(
    [("identity", "u8", 2), ("low", "i8"), ("high", "i8"), ("labelled", "?"), ("nan", "?")]
)
"""Of a sample: a hash that does not depend on how numbers are stored, its smallest and largest
label that is not ignored (none where the first exceeds the second), whether it has a target, and
whether an input holds NaN."""
PLACE = np.uint64(0x9E3779B97F4A7C15)
"""By what the hash of earlier tensors of a sample is multiplied: 2⁶⁴ over the golden ratio, odd."""
# Their products stay in the processor's cache: 2^21 numbers at a time take three times as long.
CHUNK = 2**17  # numbers of samples in memory that are hashed together, at most, or one sample


@dataclass(frozen=True)
class Contents:
    """What the data depend on: how samples are made, and hashes of them."""

    made: Mapping[str, Any]
    """How samples are made, and batches of them."""
    lengths: Mapping[str, int]
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


def hashes_of_tensors(tensors: Tensors) -> NDArray[np.uint64]:
    """Return hashes of each sample, or each few samples, of tensors in memory, [hashes, 2]."""
    count = max(len(tensor) for tensor in tensors)
    size = -(-count // PIECES)
    pieces = ([x[first : first + size] for x in tensors] for first in range(0, count, size))
    return as_hashes(map(_hash, pieces))


def hash_samples(
    samples: list[Any], as_batch: Callable[[list[Any]], Batch] | None = None
) -> tuple[bytes, bytes, Recording]:
    """Return hashes and facts of samples, and the files that a worker read; a collate_fn."""
    hashes = facts = b""
    for sample in samples:
        if as_batch:
            batch = as_batch([sample])
            inputs, target = batch.inputs, batch.target
        else:
            inputs, target = adapt(sample)
        leaves, nest = flatten(target)
        # What identifies the nest of a target beside its tensors; nothing for one tensor.
        structure = repr(nest) if isinstance(target, dict | list) else ""
        hashes += _hash([*inputs, *leaves], structure)
        facts += facts_of_rows([x[None] for x in inputs], [y[None] for y in leaves]).tobytes()
    return hashes, facts, take_recorded() if get_worker_info() else Recording()


def hash_of_state(dataset: Any) -> bytes:
    """Hash what a dataset holds: arrays, settings, user code; files by name, size and date."""
    digest = hashlib.blake2b(digest_size=16)
    for value in islice(reachable_objects(dataset), MOST_OBJECTS):
        digest.update(_describe_held(value))
    return digest.digest()


def _describe_held(value: Any) -> bytes:
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


def _hash(tensors: Tensors, structure: str = "") -> bytes:
    count("hashed.bytes", sum(tensor.nbytes for tensor in tensors))
    digest = hashlib.blake2b(structure.encode(), digest_size=16)
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(bytes_of(tensor))
    return digest.digest()


@dataclass(frozen=True)
class SplitFacts:
    """Facts of the samples of a split that were read."""

    indices: Sequence[int]
    rows: NDArray[np.void]
    """Of type :data:`FACTS`, one for each index."""

    def first(self, is_meant: NDArray[np.bool_]) -> int | None:
        """Return the index of the first sample that is meant; None where there is none."""
        found = np.flatnonzero(is_meant)
        return self.indices[int(found[0])] if len(found) else None

    def shared_with(self, other: SplitFacts) -> int:
        """Return how many of the samples are in another split, too."""
        # A hash is a row of two numbers, and isin compares scalars.
        pair = [("a", np.uint64), ("b", np.uint64)]
        rows = (np.ascontiguousarray(facts.rows["identity"]) for facts in (self, other))
        own, others = (hashes.view(pair).ravel() for hashes in rows)
        return int(np.isin(own, others).sum())

    def check_labels(self, split: str, classes: int) -> None:
        """Raise PipelineInvalid for a label beyond the classes; one class answers yes or no."""
        low, high = self.rows["low"], self.rows["high"]
        index = self.first((low <= high) & ((low < 0) | (high >= max(classes, 2))))
        if index is None:
            return
        row = self.rows[self.indices.index(index)]
        wrong = row["low"] if row["low"] < 0 else row["high"]
        problem = out_of_range(int(wrong), classes)
        raise PipelineInvalid(f"split {split!r}, sample {index}: {problem}")


def out_of_range(label: int, classes: int) -> str:
    """Return the error of a label that is none of a number of classes; one means yes or no."""
    if classes == 1:
        return (
            f"label {label} is out of range: the model answers yes or no, 0 or 1 ({IGNORED_LABEL} "
            "is left out); for numbers use mse, l1 or smooth_l1 (with floats), for more than two "
            "classes one output for each"
        )
    return (
        f"label {label} is out of range: the model has {classes} classes, 0 to {classes - 1} "
        f"({IGNORED_LABEL} is left out); give it as many classes as there are labels, or number "
        "them from 0"
    )


def facts_of_rows(inputs: Tensors, targets: Tensors) -> NDArray[np.void]:
    """Return the facts of samples that lie on axis 0 of tensors, `(samples,)`."""
    columns = [x.detach().cpu() for x in (*inputs, *targets)]
    samples = max(map(len, columns))
    facts = np.zeros(samples, FACTS)
    size = max(1, CHUNK // max(1, sum(x.numel() for x in columns) // max(1, samples)))
    for start in range(0, samples, size):
        rows = [x[start : start + size] for x in columns]
        _fill(facts[start : start + size], rows[: len(inputs)], rows[len(inputs) :])
    return facts


def _fill(facts: NDArray[np.void], inputs: Tensors, targets: Tensors) -> None:
    numbers = [x.float() if x.is_floating_point() else x for x in inputs]
    # As float64, in which 1 of any type is the same.
    numbers += [(y.float() if y.is_floating_point() else y).double() for y in targets]
    identity = np.zeros((len(facts), 2), np.uint64)
    for x in numbers:
        content = x.reshape(len(x), -1).contiguous().view(torch.uint8).numpy()
        content = np.pad(content, ((0, 0), (0, -content.shape[1] % 8)))
        words = np.ascontiguousarray(content).view(np.uint64)
        weights = _odd_numbers(words.shape[1])
        shape = np.uint64(hash(tuple(x.shape[1:])) & (2**63 - 1))
        # Not a matrix product, which numpy computes 200 times as slowly for integers.
        sums = np.stack([(words * row).sum(1) for row in weights], 1)
        identity = identity * PLACE + sums + shape
    facts["identity"] = identity
    facts["low"], facts["high"], facts["labelled"] = np.iinfo(np.int64).max, -1, bool(targets)
    for x in numbers[: len(inputs)]:
        if x.is_floating_point():
            # By numpy: torch's threads wait for each other on a busy machine.
            facts["nan"] |= np.isnan(x.reshape(len(x), -1).numpy()).any(1)
    if len(targets) != 1 or not targets[0][:1].numel():
        return
    labels = targets[0].reshape(len(facts), -1)
    if labels.is_floating_point():
        facts["labelled"] = ~labels.isnan().all(1).numpy()
        return
    labels = labels.long()
    is_known = labels != IGNORED_LABEL
    facts["labelled"] = is_known.any(1).numpy()
    facts["low"] = labels.where(is_known, np.iinfo(np.int64).max).amin(1).numpy()
    facts["high"] = labels.where(is_known, np.iinfo(np.int64).min).amax(1).numpy()


@lru_cache(maxsize=8)
def _odd_numbers(count: int) -> NDArray[np.uint64]:
    """Return random odd numbers, `(2, count)`: a sum of words times these is their hash."""
    random = np.random.default_rng(0)
    numbers: NDArray[np.uint64] = random.integers(0, 2**64, (2, count), np.uint64, endpoint=False)
    return numbers | np.uint64(1)
