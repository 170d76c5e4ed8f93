"""Disk cache of samples: each is read from a slow dataset once, and from a file after that."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
import uuid
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load, save
from torch.utils.data import Dataset

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.process import seeded
from compress.data.batch import LABELS, adapt
from compress.data.targets import Targets, flatten, map_leaves

NEST = f"{LABELS}:nest"
PROBES = 8  # samples read from a dataset twice, to detect changed data and what is drawn at random
HEADER = struct.Struct("<4sQQII")
VALID, VOID = b"keep", b"void"
SUFFIX = ".samples"
log = logging.getLogger(__name__)
Probes: TypeAlias = dict[int, tuple[str, str]]
"""Index of a sample → its digests, which differ if something is drawn at random."""


@dataclass(frozen=True)
class Sample:
    """A sample as tensors, in a form that can be stored."""

    inputs: tuple[torch.Tensor, ...]
    target: Targets | None
    names: tuple[str, ...] | None
    """Names of the inputs of a mapping."""

    @classmethod
    def from_value(cls, value: Any) -> Sample:
        """Convert a dataset's sample."""
        inputs, target = adapt(value)
        names = tuple(k for k in value if k != LABELS) if hasattr(value, "keys") else None
        return cls(inputs, target, names)

    def value(self) -> Any:
        """Return it in a form that :func:`~compress.data.batch.collate` takes."""
        if self.names is None:
            return (self.inputs,) if self.target is None else (self.inputs, self.target)
        labels = {} if self.target is None else {LABELS: self.target}
        return dict(zip(self.names, self.inputs, strict=True)) | labels

    def to_bytes(self) -> bytes:
        """Return it as safetensors: inputs are named `position:name`, the target `labels`.

        A nest of targets is named `labels:number`, and `labels:nest` holds it as JSON in bytes.
        """
        names = self.names or [""] * len(self.inputs)
        inputs = enumerate(zip(names, self.inputs, strict=True))
        tensors = {f"{i}:{name}": x for i, (name, x) in inputs}
        if isinstance(self.target, dict | list):
            leaves, nest = flatten(self.target)
            tensors |= {f"{LABELS}:{i}": leaf for i, leaf in enumerate(leaves)}
            tensors[NEST] = torch.tensor(list(json.dumps(nest).encode()), dtype=torch.uint8)
        elif self.target is not None:
            tensors[LABELS] = self.target
        # Tensors of one sample may share memory, which safetensors refuses.
        return save({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Sample:
        """Restore what :meth:`to_bytes` stored."""
        tensors = load(content)
        target: Targets | None = tensors.pop(LABELS, None)
        if NEST in tensors:
            nest = json.loads(bytes(tensors.pop(NEST).tolist()))
            target = map_leaves(nest, lambda i: tensors.pop(f"{LABELS}:{i}"))
        keys = sorted(tensors, key=lambda key: int(key.partition(":")[0]))
        names = tuple(key.partition(":")[2] for key in keys)
        return cls(tuple(tensors[key] for key in keys), target, names if any(names) else None)


class CachedDataset(Dataset[Any]):
    """A dataset whose samples are stored in a folder when they are first read."""

    def __init__(self, dataset: Dataset[Any], folder: Path) -> None:
        self.dataset = dataset
        self.records = RecordLog(folder, len(dataset))  # type: ignore[arg-type]  # Splits admits sized datasets only

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        wanted = [range(len(self))[index] for index in indices]
        samples = self._read_cached(wanted)
        if len(samples) < len(set(wanted)):
            self.records.refresh()  # other workers may have read them since
            samples = self._read_cached(wanted)
        missing = [index for index in dict.fromkeys(wanted) if index not in samples]
        for index, value in zip(missing, read_samples(self.dataset, missing), strict=True):
            samples[index] = Sample.from_value(value)
            try:
                self.records.append(index, samples[index].to_bytes())
            except OSError as error:
                raise StageFailed(
                    f"data.loader.cache: {self.records.folder} cannot be written "
                    f"({error.strerror}); make room, or choose another folder"
                ) from error
        return [samples[index].value() for index in wanted]

    def _read_cached(self, indices: Sequence[int]) -> dict[int, Sample]:
        contents = ((index, self.records.read(index)) for index in indices)
        return {index: Sample.from_bytes(c) for index, c in contents if c is not None}


def probe(dataset: Dataset[Any]) -> Probes:
    """Digest a few evenly spaced samples of a dataset, read twice with different seeds."""
    indices, digests = indices_to_probe(dataset), []
    for seed in (0, 1):
        with seeded(seed, "cpu"):
            samples = [Sample.from_value(value) for value in read_samples(dataset, indices)]
        digests.append([hashlib.sha256(sample.to_bytes()).hexdigest() for sample in samples])
    return dict(zip(indices, zip(*digests, strict=True), strict=True))


def indices_to_probe(dataset: Dataset[Any]) -> list[int]:
    """Return the indices of a few evenly spaced samples."""
    last = len(dataset) - 1  # type: ignore[arg-type]
    return sorted({round(i * last / (PROBES - 1)) for i in range(PROBES)})


def cache_folder(cache: Path, split: str, origin: str, probes: Probes) -> Path:
    """Create and return the folder for a split's samples; changed data get another folder.

    ``origin`` is what else the samples depend on: their number, the source code that makes them.
    Raises PipelineInvalid: samples are drawn at random, or the folder cannot be made.
    """
    drawn = next((index for index, (first, again) in probes.items() if first != again), None)
    if drawn is not None:
        raise PipelineInvalid(
            f"data.loader.cache: sample {drawn} of split {split!r} differs each time it is read, "
            "and a cache would freeze what is drawn at random; leave data.loader.cache out"
        )
    decisive = repr((origin, split, [first for first, _ in probes.values()]))
    folder = cache / f"{split}-{hashlib.sha256(decisive.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineInvalid(
            f"data.loader.cache: {folder} cannot be made ({error.strerror}); choose another folder"
        ) from error
    return folder


def read_samples(dataset: Dataset[Any], indices: list[int]) -> Iterable[Any]:
    """Return samples of a dataset, by one call if it has ``__getitems__``."""
    if hasattr(dataset, "__getitems__") and indices:
        return list(dataset.__getitems__(indices))
    return (dataset[index] for index in indices)


@dataclass
class Segment:
    """A segment file, and how far it has been indexed."""

    path: Path
    descriptor: int
    known: int = 0
    """Bytes whose records are in the index."""
    damaged: bool = False

    def __del__(self) -> None:
        os.close(self.descriptor)


class RecordLog:
    """Records by number in a folder that any number of processes read and append to.

    Each process appends to a segment file of its own, and reads those of all, as of the last
    :meth:`refresh`. A record is

        magic | number | length | checksum of the content | checksum of these three | content

    One that a killed process left half-written is never read; one that does not match its checksum
    is marked void with a warning, and may be appended again.
    """

    def __init__(self, folder: Path, count: int) -> None:
        """Index all records in a folder; their numbers are below ``count``."""
        # Seeded with the folder's name: a file copied from another folder reads as damaged.
        self.folder, self.salt = folder, zlib.crc32(folder.name.encode())
        self.segments: list[Segment] = []
        # Segment and offset of each record: twelve bytes per record.
        self.segment_of = np.full(count, -1, np.int32)
        self.place_of = np.zeros(count, np.int64)
        self.own: tuple[int, int] | None = None
        """Process id, and index of the segment that it appends to."""
        self.refresh()

    def refresh(self) -> None:
        """Index what other processes have appended since."""
        known = {segment.path for segment in self.segments}
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if path not in known:
                self.segments.append(Segment(path, os.open(path, os.O_RDONLY)))
        for place, segment in enumerate(self.segments):
            size = os.fstat(segment.descriptor).st_size
            while not segment.damaged and segment.known + HEADER.size <= size:
                header = os.pread(segment.descriptor, HEADER.size, segment.known)
                magic, number, length, _, checksum = HEADER.unpack(header)
                end = segment.known + HEADER.size + length
                is_valid = zlib.crc32(header[4:-4], self.salt) == checksum
                if not is_valid or magic not in (VALID, VOID) or number >= len(self.segment_of):
                    segment.damaged = True
                    damage = "%s is damaged from byte %d on; those samples are read again"
                    log.warning(damage, segment.path, segment.known)
                    break
                if end > size:
                    break  # being written, or left by a process that was killed
                if magic == VALID:
                    self.segment_of[number], self.place_of[number] = place, segment.known
                segment.known = end

    def read(self, number: int) -> bytes | None:
        """Return a record; None if it is unknown or damaged."""
        place = int(self.segment_of[number])
        if place < 0:
            return None
        segment, start = self.segments[place], int(self.place_of[number])
        header = os.pread(segment.descriptor, HEADER.size, start)
        if len(header) == HEADER.size:
            _, _, length, checksum, _ = HEADER.unpack(header)
            content = os.pread(segment.descriptor, length, start + HEADER.size)
            if len(content) == length and zlib.crc32(content, self.salt) == checksum:
                return content
        log.warning("%s is damaged; sample %d is read again", segment.path, number)
        self.segment_of[number] = -1
        with suppress(OSError), segment.path.open("r+b") as stream:
            stream.seek(start)
            stream.write(VOID)  # so that no other process indexes it
        return None

    def append(self, number: int, content: bytes) -> None:
        """Append a record, unsynced, completely or not at all; raise OSError if it cannot be."""
        # A forked worker inherits its parent's segment, and must append to another one.
        if self.own is None or self.own[0] != os.getpid():
            path = self.folder / f"{uuid.uuid4().hex}{SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self.segments.append(Segment(path, descriptor))
            self.own = os.getpid(), len(self.segments) - 1
        place = self.own[1]
        segment = self.segments[place]
        fields = struct.pack("<QQI", number, len(content), zlib.crc32(content, self.salt))
        record = VALID + fields + struct.pack("<I", zlib.crc32(fields, self.salt)) + content
        try:
            written = 0
            while written < len(record):
                written += os.pwrite(segment.descriptor, record[written:], segment.known + written)
        except OSError:
            # Or what is left of it behind a shorter record, appended next, would read as damage.
            os.ftruncate(segment.descriptor, segment.known)
            raise
        self.segment_of[number], self.place_of[number] = place, segment.known
        segment.known += len(record)
