"""A disk cache of samples: each is read from a slow dataset once, and from a file ever after."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.process import seeded
from compress.data.batch import LABELS, adapt
from compress.data.record_log import RecordLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch

PROBES = 8
"""Samples read from the dataset itself whenever a cache is opened, to notice that they changed."""


@dataclass(frozen=True)
class Sample:
    """A sample as tensors, whatever form it had."""

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor | None
    names: tuple[str, ...] | None
    """Names of the inputs of a mapping."""

    @classmethod
    def of(cls, value: Any) -> Sample:
        """Return what a dataset gave."""
        inputs, target = adapt(value)
        names = tuple(k for k in value if k != LABELS) if hasattr(value, "keys") else None
        return cls(inputs, target, names)

    def value(self) -> Any:
        """Return it in one of the forms that batches are made of."""
        if self.names is None:
            return (self.inputs,) if self.target is None else (self.inputs, self.target)
        labels = {} if self.target is None else {LABELS: self.target}
        return dict(zip(self.names, self.inputs, strict=True)) | labels

    def to_bytes(self) -> bytes:
        """Return it as safetensors: inputs are `place:name`, the target is `labels`."""
        from safetensors.torch import save

        names = self.names or [""] * len(self.inputs)
        tensors = {
            f"{i}:{name}": x for i, (name, x) in enumerate(zip(names, self.inputs, strict=True))
        }
        tensors |= {} if self.target is None else {LABELS: self.target}
        # Tensors of one sample may share memory, which safetensors refuses.
        return save({name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Sample:
        """Return what :meth:`to_bytes` gave."""
        from safetensors.torch import load

        tensors = load(content)
        target = tensors.pop(LABELS, None)
        keys = sorted(tensors, key=lambda key: int(key.partition(":")[0]))
        names = tuple(key.partition(":")[2] for key in keys)
        return cls(tuple(tensors[key] for key in keys), target, names if any(names) else None)


class CachedDataset(Dataset[Any]):
    """A dataset whose samples come from a folder, once they are there."""

    def __init__(self, dataset: Dataset[Any], folder: Path) -> None:
        self.dataset = dataset
        self.segments = RecordLog(folder, len(dataset))  # type: ignore[arg-type]  # Splits admits sized datasets only

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        wanted = [range(len(self))[index] for index in indices]
        samples = self._kept(wanted)
        if len(samples) < len(set(wanted)):
            self.segments.refresh()
            samples = self._kept(wanted)
        missing = [index for index in dict.fromkeys(wanted) if index not in samples]
        for index, value in zip(missing, read_samples(self.dataset, missing), strict=True):
            samples[index] = Sample.of(value)
            self._keep(index, samples[index])
        return [samples[index].value() for index in wanted]

    def _kept(self, indices: Sequence[int]) -> dict[int, Sample]:
        found = ((index, self.segments.read(index)) for index in indices)
        return {index: Sample.from_bytes(c) for index, c in found if c is not None}

    def _keep(self, index: int, sample: Sample) -> None:
        try:
            self.segments.append(index, sample.to_bytes())
        except OSError as error:
            raise StageFailed(
                f"data.loader.cache: {self.segments.folder} cannot be written ({error.strerror}); "
                "make room, or choose another folder"
            ) from error


@dataclass(frozen=True)
class Probe:
    """A sample as the dataset itself gives it, read twice."""

    index: int
    first: str
    again: str
    """Digests; they differ where something is drawn at random."""


def probe(dataset: Dataset[Any]) -> list[Probe]:
    """Read a few samples from a dataset, evenly spaced."""
    last = len(dataset) - 1  # type: ignore[arg-type]
    indices = sorted({round(i * last / (PROBES - 1)) for i in range(PROBES)})
    first, again = (_digests(dataset, indices, seed) for seed in (0, 1))
    return [Probe(*found) for found in zip(indices, first, again, strict=True)]


def cache_folder(cache: Path, split: str, origin: str, probes: Sequence[Probe]) -> Path:
    """Return the folder of a split's samples, which exists; other data have another one.

    Args:
        cache: the folder of all caches.
        split: the split's name.
        origin: what decides the samples besides: their number, the source code that makes them.
        probes: a few samples as they are now.

    Raises:
        PipelineInvalid: samples are drawn at random, or the folder cannot be made.
    """
    drawn = next((p.index for p in probes if p.first != p.again), None)
    if drawn is not None:
        raise PipelineInvalid(
            f"data.loader.cache: sample {drawn} of split {split!r} differs each time it is read, "
            "and a cache would freeze what is drawn at random; leave data.loader.cache out"
        )
    decisive = repr((origin, split, [p.first for p in probes]))
    folder = cache / f"{split}-{hashlib.sha256(decisive.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineInvalid(
            f"data.loader.cache: {folder} cannot be made ({error.strerror}); choose another folder"
        ) from error
    return folder


def read_samples(dataset: Dataset[Any], indices: list[int]) -> Iterable[Any]:
    """Give samples of a dataset, all at once where it can."""
    if hasattr(dataset, "__getitems__") and indices:
        return list(dataset.__getitems__(indices))
    return (dataset[index] for index in indices)


def _digests(dataset: Dataset[Any], indices: list[int], seed: int) -> list[str]:
    with seeded(seed, "cpu"):
        samples = [Sample.of(value) for value in read_samples(dataset, indices)]
    return [hashlib.sha256(sample.to_bytes()).hexdigest() for sample in samples]
