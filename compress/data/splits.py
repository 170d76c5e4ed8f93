"""Splits: the user's datasets by name, read in batches, with a fingerprint for cache keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils import data

from compress.common.dependency_recorder import Recording, add_to_recordings, recording
from compress.common.errors import (
    CompressError,
    PipelineInvalid,
    StageFailed,
    exits_refused,
    first_line,
)
from compress.common.factories import local_sources, resolve, sources_digest
from compress.data.batch import LABELS, Batch, adapt, collate, collate_as, collate_by
from compress.data.dataloader import Reader, Stream, StreamReader, WorkerEnded, spread_indices
from compress.data.fingerprint import (
    FACTS,
    Contents,
    SplitFacts,
    as_hashes,
    digest_of_hashes,
    facts_of_rows,
    hash_of_state,
    hash_samples,
    hashes_of_tensors,
    in_memory_tensors,
    indices_to_hash,
)
from compress.data.loader_config import Loading
from compress.data.sample_cache import CachedDataset, cache_folder, indices_to_probe, probe
from compress.data.targets import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Key = tuple[str, Sequence[int]]

__all__ = ["Batch", "DataReference", "Splits", "collate"]
CALLED_BYTES = 5 * 2**19
"""Inputs of a call in evaluation: 4 images of 224 x 224 pixels. More rows take no less time a row,
and memory for activations, a multiple of this: calibrated in batches of 32 rows a MobileNetV2 took
350 MiB more."""
UNLABELLED = "unlabelled"
View: TypeAlias = "Callable[[Splits, data.Dataset[Any]], data.Dataset[Any]]"
"""Wraps the dataset of `train`; small enough to be sent to other processes."""


@dataclass(frozen=True)
class DataReference:
    """Factory of the splits and its arguments; small enough to be sent to another process."""

    factory: str
    arguments: dict[str, Any]
    folder: Path | None
    batch_size: int
    loading: Loading = field(default_factory=Loading)
    input_names: tuple[str, ...] = ()
    input_dtypes: tuple[str, ...] = ()
    name: str = ""
    """What messages call it; by default the setting `data.factory`."""

    def __str__(self) -> str:
        return self.name or f"data.factory {self.factory!r}"

    def load(self) -> Splits:
        """Call the factory; raise PipelineInvalid if it fails or returns no mapping of datasets."""
        try:
            with recording() as recorded:
                datasets = resolve(self.factory, self.folder)(**self.arguments)
        except PipelineInvalid:
            raise
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"
            raise PipelineInvalid(f"{self}: {problem}") from error
        splits = Splits(datasets, self.batch_size, self.loading, self.input_names, source=self)
        return replace(splits, recorded=recorded, input_dtypes=self.input_dtypes)


@dataclass(frozen=True)
class Splits:
    """Datasets by name: ``train``, ``val``, and as needed ``calibration`` and ``test``.

    A sample is ``(x, y)``, ``((x1, x2), y)``, a mapping of tensors with ``labels``, or bare inputs.
    ``y`` and ``labels`` are a tensor, or a mapping, list or tuple of tensors.
    Training uses ``train``, and where a teacher answers also ``unlabelled``; calibration a seeded
    sample of ``calibration``, else ``train``; every decision and gate uses ``val``; ``test`` is
    touched once, for the report. ``train`` may be an iterable dataset, which is read in its own
    order; by index it gives its first samples.
    """

    datasets: Mapping[str, data.Dataset[Any]]
    batch_size: int = 128
    """Samples per batch in evaluation."""
    loading: Loading = field(default_factory=Loading)
    input_names: tuple[str, ...] = ()
    """Order in which the model takes the entries of a mapping; the mapping's own by default."""
    source: DataReference | None = field(default=None, compare=False)
    """How another process obtains the same splits; without it they are pickled."""
    input_dtypes: tuple[str, ...] = ()
    """Types of the model's inputs, in the same order: floats of other types are converted."""
    views: tuple[View, ...] = ()
    """Wrappers of ``train``, applied in order; they can be pickled."""
    recorded: Recording = field(default_factory=Recording, compare=False, repr=False)
    _opened: Recording = field(default_factory=Recording, compare=False, repr=False)
    """Files that datasets opened whose samples were not all hashed."""
    _kept_readers: list[dict[str, Reader]] = field(default_factory=list, compare=False, repr=False)
    """Readers by split whose workers stay alive, for each active :meth:`keep_workers`."""
    # By split, once they are known.
    _lengths: dict[str, list[int]] = field(default_factory=dict, compare=False, repr=False)
    _caches: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)
    _cached: dict[str, CachedDataset] = field(default_factory=dict, compare=False, repr=False)
    _viewed: list[data.Dataset[Any]] = field(default_factory=list, compare=False, repr=False)
    """``train`` with the views applied, once it is known; at most one."""
    # Of samples that are read one by one, by split and indices: once per run.
    _hashes: dict[Key, NDArray[np.uint64]] = field(default_factory=dict, compare=False, repr=False)
    _facts: dict[Key, NDArray[np.void]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        where = self._where
        if not isinstance(self.datasets, Mapping) or not self.datasets:
            raise PipelineInvalid(
                f"{where} returned {describe(self.datasets)}, "
                'expected {"train": Dataset, "val": Dataset, …}'
            )
        for name, dataset in self.datasets.items():
            if isinstance(dataset, data.DataLoader):
                raise PipelineInvalid(
                    f"{where}: split {name!r} is a DataLoader, expected its dataset: return "
                    "loader.dataset, or Subset(loader.dataset, rows) where a sampler chooses rows; "
                    "batch size and workers are settings of `data:`"
                )
        if _is_stream(self.datasets.get("train")):
            stream = Stream(self.datasets["train"])
            object.__setattr__(self, "datasets", {**self.datasets, "train": stream})
            with self._reading("train"):
                stream.read_first()
            if self.loading.bucket_by:
                raise PipelineInvalid(
                    f"{where}: split 'train' is a stream and data.loader.bucket_by needs the "
                    "lengths of all samples; leave bucket_by out"
                )
        for name, dataset in self.datasets.items():
            if name != "train" and _is_stream(dataset):
                raise PipelineInvalid(
                    f"{where}: split {name!r} is a stream and is read by index; only 'train' may "
                    "be one: return a Dataset with a length, such as an Arrow one of Hugging Face "
                    "datasets without streaming, which is not loaded into memory"
                )
            if not isinstance(dataset, Sized) or not _reads_by_index(dataset):
                raise PipelineInvalid(
                    f"{where}: split {name!r} is {describe(dataset)}, "
                    "expected a Dataset with a length and samples by index"
                )
            if len(dataset) == 0:
                raise PipelineInvalid(f"{where}: split {name!r} is empty")

    def __reduce__(self) -> tuple[Any, ...]:
        make: Callable[..., Splits] = Splits
        datasets = {n: d.source if isinstance(d, Stream) else d for n, d in self.datasets.items()}
        given: Any = (datasets, self.batch_size, self.loading, self.input_names)
        if self.source is not None:
            make, given = DataReference.load, (self.source,)
        known = (self._caches, self._hashes, self._facts)
        return _unpickled, (make, given, self.views, self.input_dtypes, known)

    def replaced(self, **changes: Any) -> Splits:
        """Return the splits with other settings; a run may hold what stands for splits."""
        return replace(self, **changes)

    def with_view(self, view: View) -> Splits:
        """Return the splits with a view applied to ``train``."""
        if self.stream is not None:
            raise StageFailed(
                "split 'train' is a stream, to which neither 'unlabelled' samples nor a cache of "
                "the teacher's outputs can be joined; return a Dataset with samples by index"
            )
        # What was known of `train` is so no more.
        changed: dict[str, Any] = {"_kept_readers": [], "_lengths": {}, "_viewed": []}
        for name in ("_hashes", "_facts"):
            changed[name] = {k: v for k, v in getattr(self, name).items() if k[0] != "train"}
        return replace(self, views=(*self.views, view), **changed)

    def interleaved_parts(self, name: str, count: int) -> list[Splits]:
        """Return every `count`-th sample of a split, from each of its first ones on."""
        dataset: Any = self.split(name)
        loading = self.loading.model_copy(update={"cache": None})  # the dataset reads through it
        return [
            Splits(
                {name: data.Subset(dataset, range(first, len(dataset), count))},
                *(self.batch_size, loading, self.input_names, self.source, self.input_dtypes),
            )
            for first in range(count)
        ]

    def split(self, name: str) -> data.Dataset[Any]:
        """Return one dataset, with the sample cache and the views applied; see :meth:`stored`."""
        if name != "train" or not self.views:
            return self.stored(name)
        if not self._viewed:
            dataset = self.stored(name)
            for view in self.views:
                dataset = view(self, dataset)
            self._viewed.append(dataset)
        return self._viewed[0]

    def stored(self, name: str) -> data.Dataset[Any]:
        """Return one dataset with the sample cache; raise StageFailed if there is no such split."""
        if name not in self.datasets:
            raise StageFailed(f"the data has no split {name!r}; it has {', '.join(self.datasets)}")
        dataset = self.datasets[name]
        in_memory = isinstance(dataset, Stream) or in_memory_tensors(dataset) is not None
        if self.loading.cache is None or in_memory:
            return dataset
        if name in self._cached:
            return self._cached[name]
        if name not in self._caches:
            with self._reading(name) as read:
                probes = probe(dataset)
            # Only a few samples are probed: a changed file of labels is detected by its digest.
            read.add(self.recorded)
            opened = read.dependencies(Path()).model_dump()
            origin = f"{len(dataset)} {self._origin()} {opened}"  # type: ignore[arg-type]
            cache = Path(self.loading.cache).absolute()
            self._caches[name] = cache_folder(cache, name, origin, probes)
        self._cached[name] = CachedDataset(dataset, self._caches[name])
        return self._cached[name]

    def batches(
        self, name: str, batch_size: int | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Yield a split's batches in its order: all samples, or ``limit`` spread over them.

        Without ``batch_size`` batches of large samples are divided.
        """
        samples = len(self.split(name))  # type: ignore[arg-type]
        order = range(samples) if limit is None else spread_indices(samples, limit)
        for batch in self.read(name, order, batch_size or self.batch_size):
            yield from (batch,) if batch_size else self.divided(batch)

    def divided(self, batch: Batch) -> Iterable[Batch]:
        """Divide a batch of large samples, unless the user's own function has made it."""
        return (batch,) if self.loading.collate_fn else batch.divided(CALLED_BYTES)

    def read(
        self, name: str, order: Sequence[int], batch_size: int, seed: int = 0, first: int = 0
    ) -> Iterator[Batch]:
        """Yield batches of samples in an order from ``first`` on; what is random follows `seed`."""
        readers = self._kept_readers[-1] if self._kept_readers else {}
        if name not in readers:
            keeps = bool(self._kept_readers)
            collate_fn = self.collate_fn
            readers[name] = Reader(self.split(name), self.loading, collate_fn, keeps_workers=keeps)
        yield from readers[name].read(order, batch_size, seed, first)

    @property
    def stream(self) -> Stream | None:
        """``train``, if that is read in its own order."""
        train = self.datasets.get("train")
        return train if isinstance(train, Stream) else None

    def open_stream(self, seed: int) -> Reader | None:
        """Return a reader of the stream by the number over all passes; None if there is none."""
        if self.stream is None:
            return None
        samples = StreamReader(self.stream, seed, self.stream.samples)
        # More workers would each read the whole stream, and new ones read it from its start.
        one = {"workers": min(1, self.loading.workers), "persistent_workers": True}
        loading = self.loading.model_copy(update=one)
        return Reader(samples, loading, self.collate_fn, keeps_workers=True)

    @property
    def collate_fn(self) -> Callable[[list[Any]], Batch]:
        """The function that makes a batch of samples."""
        name, folder = self.loading.collate_fn, self.source.folder if self.source else None
        own: Any = partial(collate, pad_values=self.loading.pad_values)
        if name:
            own = partial(collate_by, function=resolve(name, folder), name=name)
        own = partial(own, input_names=self.input_names)
        return partial(collate_as, collate_fn=own, dtypes=self.input_dtypes)

    @contextmanager
    def keep_workers(self) -> Iterator[None]:
        """Keep worker processes alive between reads until the end of a block."""
        self._kept_readers.append({})
        try:
            yield
        finally:
            self._kept_readers.pop()

    def lengths(self, name: str) -> list[int] | None:
        """Return the length of each sample if training buckets by length, else None."""
        if self.loading.bucket_by is None:
            return None
        if name not in self._lengths:
            dataset: Any = self.split(name)
            # By the reader, so that lengths drawn at random are the same in each run and process.
            collate_fn = partial(_lengths_of, name, self.loading.bucket_by)
            reader = Reader(dataset, self.loading, collate_fn, keeps_workers=False)
            batches = reader.read(range(len(dataset)), self.batch_size, seed=0)
            self._lengths[name] = [length for batch in batches for length in batch]
        return self._lengths[name]

    @property
    def calibration_split(self) -> str:
        """Name of the split for calibration."""
        return "calibration" if "calibration" in self.datasets else "train"

    def calibration(self, samples: int, seed: int) -> Iterator[Batch]:
        """Yield a seeded sample of the calibration split; raise StageFailed if that has fewer."""
        name = self.calibration_split
        available = len(self.split(name))  # type: ignore[arg-type]
        if samples > available:
            raise StageFailed(
                f"{samples} calibration samples asked for and split {name!r} has {available}; "
                "ask for fewer or bring more data"
            )
        return self.read(name, self._calibration_order(samples, seed), self.batch_size)

    def _calibration_order(self, samples: int, seed: int) -> list[int]:
        if isinstance(self.datasets[self.calibration_split], Stream):
            return list(range(samples))
        available = len(self.split(self.calibration_split))  # type: ignore[arg-type]
        order = torch.randperm(available, generator=torch.Generator().manual_seed(seed))
        return order[:samples].tolist()

    def calibration_digest(self, samples: int, seed: int) -> str | None:
        """Return a digest of calibration samples; None if :meth:`contents` covers all of them."""
        name = self.calibration_split
        if name not in self.datasets or in_memory_tensors(self.split(name)) is not None:
            return None  # what is in memory is hashed whole
        if name not in self.contents().sampled:
            return None
        return digest_of_hashes(self._hashes_of(name, self._calibration_order(samples, seed)))

    def recorded_reads(self) -> Recording:
        """Return the reads of the factory, and of datasets whose samples were not all hashed."""
        reads = Recording()
        reads.add(self.recorded)
        reads.add(self._opened)
        return reads

    def fingerprint(self) -> str:
        """Return a SHA-256 over :meth:`contents`, which lists the exceptions."""
        return self.contents().fingerprint

    def contents(self, most: int | None = None) -> Contents:
        """Return what the data depend on: hashes of samples, batch size, source of the factory.

        With `most`, at most so many samples, spread over each split, are read one by one.
        """
        made = {"batch_size": self.batch_size, **self._origin()}
        if self.loading.bucket_by or self.loading.pad_values:
            made["loader"] = f"{self.loading.bucket_by} {self.loading.pad_values}"
        if self.loading.collate_fn:
            folder = self.source.folder if self.source else None
            code = sources_digest(local_sources(self.loading.collate_fn, folder))
            made["collate_fn"] = [self.loading.collate_fn, code]
        streams = {}
        if self.stream is not None:
            streams["train"] = self.stream.fingerprint
            # Hugging Face's streams are shuffled in another order in a worker.
            made["streams"] = [streams, bool(self.loading.workers)]
        lengths, hashes, counts, facts, unrepeatable = {}, {}, {}, {}, set()
        for name in sorted(self.datasets):
            dataset = self.split(name)
            lengths[name] = counts[name] = len(dataset)  # type: ignore[arg-type]
            held = in_memory_tensors(dataset)
            if held is not None:
                hashes[name] = hashes_of_tensors(held)
                # Others may change what they hold: their samples are read.
                is_plain = type(dataset).__getitem__ is data.TensorDataset.__getitem__
                if is_plain and not self.loading.collate_fn:
                    rows = facts_of_rows(held[:1], held[1:])
                    facts[name] = SplitFacts(range(len(rows)), rows)
                    continue
            is_stream = isinstance(dataset, Stream)
            read = range(lengths[name]) if is_stream else indices_to_hash(name, lengths[name])
            spread = spread_indices(len(read), most or len(read))
            indices = read if len(spread) == len(read) else tuple(read[i] for i in spread)
            found = self._hashes_of(name, indices)
            is_repeatable = len(found) == len(indices)
            if is_repeatable:
                facts[name] = SplitFacts(indices, self._facts[name, indices])
            if held is None:
                hashes[name] = found
                counts[name] = len(indices) if is_repeatable else 0
                if not is_repeatable:
                    unrepeatable.add(name)
        cached, varying = frozenset(self._cached), frozenset(unrepeatable)
        return Contents(made, lengths, hashes, counts, cached, varying, facts, streams)

    def _hashes_of(self, name: str, indices: Sequence[int]) -> NDArray[np.uint64]:
        """Return hashes of samples, [samples, 2]; [1, 2], of the dataset, if samples vary."""
        key = name, tuple(indices) if isinstance(indices, list) else indices
        if key not in self._hashes:
            dataset = self.split(name)
            is_sampled = len(indices) < len(dataset)  # type: ignore[arg-type]
            # Samples that only the user's function understands are hashed as batches of one.
            as_batch = self.collate_fn if self.loading.collate_fn else None
            collate_fn = partial(hash_samples, as_batch=as_batch)
            reader = Reader(
                dataset, self.loading, collate_fn, keeps_workers=False, records=is_sampled
            )
            # A cache was probed when it was made; two workers would read the same samples at once.
            is_cached = isinstance(dataset, CachedDataset)
            probes = [] if is_cached else [indices_to_probe(dataset)] * 2
            starts = range(0, len(indices), self.batch_size)
            chunks = [indices[i : i + self.batch_size] for i in starts]
            hashes, facts, is_repeatable = [], [], True
            with self._reading(name):
                for batch, known, worker_reads in reader.read_batches([*probes, *chunks], seed=0):
                    add_to_recordings(worker_reads)
                    hashes.append(batch)
                    facts.append(known)
                    if probes and len(hashes) == 2 and hashes[0] != hashes[1]:
                        is_repeatable = False
                        break
            own = hashes[len(probes) :] if is_repeatable else [hash_of_state(dataset)]
            self._hashes[key] = as_hashes(own)
            self._facts[key] = np.frombuffer(b"".join(facts[len(probes) :]), FACTS)
        return self._hashes[key]

    @property
    def _where(self) -> str:
        return str(self.source) if self.source else "the data"

    def _origin(self) -> dict[str, Any]:
        if self.source is None:
            return {}
        code = sources_digest(local_sources(self.source.factory, self.source.folder))
        given = sorted(self.source.arguments.items())
        arguments = {name: getattr(value, "identity", repr(value)) for name, value in given}
        return {"factory": self.source.factory, "arguments": arguments, "code": code}

    @contextmanager
    def _reading(self, split: str) -> Iterator[Recording]:
        """Record which files a block opens, and say which split it could not read."""
        try:
            with exits_refused(), recording() as read:
                yield read
        except WorkerEnded:
            raise
        except Exception as error:
            kind = "" if isinstance(error, CompressError) else f"{type(error).__name__}: "
            raise PipelineInvalid(
                f"{self._where}: a sample of split {split!r} cannot be read: "
                f"{kind}{first_line(error)}"
            ) from error
        self._opened.add(read)


def _reads_by_index(dataset: Any) -> bool:
    # torch gives an iterable dataset a __getitem__ that raises.
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, data.IterableDataset)


def _is_stream(dataset: Any) -> bool:
    is_unread = isinstance(dataset, Iterable) and not _reads_by_index(dataset)
    return is_unread and not isinstance(dataset, Stream)


def _lengths_of(split: str, key: str, samples: list[Any]) -> list[int]:
    try:
        return [len(sample[key]) for sample in samples]
    except (KeyError, IndexError, TypeError) as error:
        raise PipelineInvalid(
            f"data.loader.bucket_by: samples of split {split!r} have no {key!r} with a length"
        ) from error


def _unpickled(
    make: Callable[..., Splits],
    given: Any,
    views: tuple[View, ...],
    input_dtypes: tuple[str, ...],
    known: Sequence[dict[Any, Any]],
) -> Splits:
    splits = make(*given)
    own: tuple[dict[Any, Any], ...] = (splits._caches, splits._hashes, splits._facts)
    for cache, content in zip(own, known, strict=True):
        cache.update(content)
    return replace(splits, views=views, input_dtypes=input_dtypes)


def _append_unlabelled(splits: Splits, dataset: data.Dataset[Any]) -> data.Dataset[Any]:
    return data.ConcatDataset([dataset, WithoutLabels(splits.stored(UNLABELLED))])


class WithoutLabels(data.Dataset[Any]):
    """A dataset's samples without their targets; its name is part of fingerprints."""

    def __init__(self, dataset: data.Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Splits admits sized datasets only

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if hasattr(sample, "keys"):
            return {name: sample[name] for name in sample if name != LABELS}
        return (adapt(sample)[0],)


def with_unlabelled(splits: Splits) -> Splits:
    """Return the splits with `unlabelled` appended to `train`; unchanged without that split."""
    return splits.with_view(_append_unlabelled) if UNLABELLED in splits.datasets else splits
