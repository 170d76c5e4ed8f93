"""Reader: reads a dataset in batches, in this process or in workers, with the same result.

Random numbers that are drawn while a sample is read (augmentation) follow from the seed and the
sample's index alone: not from the worker or the rank that reads it, nor from what was read before.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader, Dataset, get_worker_info

from compress.common.dependency_recorder import recording_paused
from compress.common.errors import (
    CompressError,
    PipelineInvalid,
    StageFailed,
    exits_refused,
    first_line,
)
from compress.common.process import derive_seed, reseed, seeded
from compress.data.fingerprint import hash_of_state
from compress.data.own_generators import (
    draws_nothing,
    own_generators,
    reads_batches,
    seed_generators,
    states_restored,
)

if TYPE_CHECKING:
    from compress.data.loader_config import Loading

# "(pid(s) 7) exited unexpectedly", caused by "(pid 7) is killed by signal: Killed."
DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(?: exited)?(?:.*signal: ([\w ]+))?", re.DOTALL
)
FIRST_SAMPLES = 512  # samples of a stream that are held in memory, for whatever needs them by index


class WorkerEnded(StageFailed):
    """A data worker's process ended unexpectedly; not an error of the data or the settings."""


class Reader:
    """A dataset and the worker processes that read it, which end with the reader."""

    def __init__(
        self,
        dataset: Dataset[Any],
        loading: Loading,
        collate_fn: Callable[[list[Any]], Any],
        *,
        keeps_workers: bool,
        records: bool = False,
    ) -> None:
        """Start the workers; with ``keeps_workers`` they stay alive between reads.

        With ``records``, not needed if all samples are hashed, opened files are recorded.
        """
        # Changed before each iteration, so that workers can stay alive.
        self.plan = _Plan()
        workers: dict[str, Any] = {}
        if loading.workers:
            # Processes started by spawn would need the user's code on sys.path.
            workers["multiprocessing_context"] = "fork"
            workers["prefetch_factor"] = loading.prefetch_factor
            workers["persistent_workers"] = keeps_workers and loading.persistent_workers
        self.loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, collate_fn, records),
            # Typed as lists of indices; each item is passed to __getitems__ unchanged.
            batch_sampler=self.plan,  # type: ignore[arg-type]
            collate_fn=lambda batch: batch,  # each batch is collated where it is read
            num_workers=loading.workers,
            pin_memory=loading.pin_memory and torch.accelerator.is_available(),
            # The loader draws a seed for its workers, which must not change training's generator.
            generator=torch.Generator().manual_seed(0),
            **workers,
        )

    def read(
        self, order: Sequence[int], batch_size: int, seed: int, first: int = 0
    ) -> Iterator[Any]:
        """Yield the samples with some indices in batches, or raise StageFailed (WorkerEnded)."""
        starts = range(first, len(order), batch_size)
        batches = (order[start : start + batch_size] for start in starts)
        yield from self.read_batches(batches, seed)

    def read_batches(self, batches_of_indices: Iterable[Sequence[int]], seed: int) -> Iterator[Any]:
        """Yield batches of the samples with some indices, or raise StageFailed (WorkerEnded)."""
        self.plan.seed, self.plan.batches = seed, batches_of_indices
        batches = iter(self.loader)
        try:
            yield from batches
        except Exception as error:
            # The error's traceback would keep the workers alive; torch has no public stop.
            getattr(batches, "_shutdown_workers", lambda: None)()
            self.loader._iterator = None
            raise original_error(error) from error


@dataclass
class _Plan:
    seed: int = 0
    batches: Iterable[Sequence[int]] = ()

    def __iter__(self) -> Iterator[tuple[int, Sequence[int]]]:
        for indices in self.batches:
            yield self.seed, indices


class _Seeded(Dataset[Any]):
    """Reads and collates batches with seeded generators, in whatever process it is."""

    def __init__(
        self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any], records: bool
    ) -> None:
        self.dataset, self.collate_fn, self.records = dataset, collate_fn, records
        self.generators = self._own_generators()
        self.has_read = False

    def __getitems__(self, batch: tuple[int, Sequence[int]]) -> Any:
        seed, indices = batch
        try:
            with exits_refused(), nullcontext() if self.records else recording_paused():
                collated = self._read(seed, indices)
                if not self.has_read:
                    self.has_read, known = True, self.generators
                    self.generators = self._own_generators()
                    # Some datasets make their generator when a process reads the first sample.
                    if list(map(id, known)) != list(map(id, self.generators)):
                        collated = self._read(seed, indices)
                return collated
        except Exception as error:
            if get_worker_info() is None:
                raise
            if isinstance(error, CompressError):
                raise type(error)(first_line(error)) from error
            message = f"{type(error).__name__}: {first_line(error)}"
            if "CUDA in forked subprocess" in message:
                message = (
                    "the dataset uses a CUDA device, which a data worker cannot: return samples "
                    "in main memory, or set data.loader.workers: 0"
                )
            raise StageFailed(message) from error

    def _own_generators(self) -> list[Any]:
        # A stream seeds those of its dataset itself, also for samples that it passes over.
        if isinstance(self.dataset, StreamReader):
            return own_generators(self.collate_fn)
        return own_generators(self.dataset, self.collate_fn)

    def _read(self, seed: int, indices: Sequence[int]) -> Any:
        # A batch that is read as a whole has one seed, and so has its collating.
        batch_seed = derive_seed(seed, indices[0], len(indices))
        with seeded(batch_seed, "cpu"), states_restored(self.generators):
            seed_generators(self.generators, batch_seed)
            if draws_nothing(self.dataset):
                samples = [self.dataset[index] for index in indices]
            elif reads_batches(self.dataset):
                samples = list(self.dataset.__getitems__(list(indices)))  # type: ignore[attr-defined]
            else:
                samples = []
                for index in indices:
                    sample_seed = derive_seed(seed, index)
                    reseed(sample_seed, "cpu")
                    seed_generators(self.generators, sample_seed)
                    samples.append(self.dataset[index])
                reseed(batch_seed, "cpu")
                seed_generators(self.generators, batch_seed)
            return self.collate_fn(samples)


def original_error(error: Exception) -> Exception:
    """Return a worker's error without the traceback that torch puts into its message."""
    died = DIED.search(f"{error} {error.__cause__ or error.__context__ or ''}")
    # Another process ended while torch took over a tensor of it. A connection of the user's own may
    # end as well, outside of torch's code for tensors.
    frames = traceback.walk_tb(error.__traceback__)
    is_lost = isinstance(error, EOFError | ConnectionError) and any(
        frame.f_code.co_filename == reductions.__file__ for frame, _ in frames
    )
    if (died or is_lost) and not isinstance(error, CompressError):
        which = f" (pid {died[1]})" if died else ""
        how = f"was killed by signal: {died[2]}" if died and died[2] else "ended unexpectedly"
        return WorkerEnded(
            f"a data worker{which} {how}; perhaps memory ran out: lower "
            "data.loader.workers or data.loader.prefetch_factor"
        )
    lines = str(error).strip().splitlines()
    if not lines or "in DataLoader worker process" not in lines[0]:
        return error
    message = lines[-1].partition(f"{type(error).__name__}: ")[2] or lines[-1]
    return type(error)(message) if isinstance(error, CompressError) else StageFailed(lines[-1])


def spread_indices(available: int, wanted: int) -> Sequence[int]:
    """Return the indices of samples that stand for a whole split, in order; all where it has few.

    They are one of each of ``wanted`` equal stretches, drawn at random by a fixed seed: the first
    samples of a split that is sorted are of one class or source, and evenly spaced ones may be so
    too where classes repeat in order.
    """
    if wanted >= available:
        return range(available)
    starts = torch.arange(wanted + 1) * available // wanted
    draw = torch.rand(wanted, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    indices: list[int] = (starts[:-1] + (draw * starts.diff()).long()).tolist()
    return indices


class Stream(Dataset[Any]):
    """An iterable dataset; by index it gives its first samples, which stay in memory."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self._first: list[Any] | None = None

    @property
    def samples(self) -> int | None:
        """The stream's own length; None where it has none."""
        try:
            return len(self.source) if isinstance(self.source, Sized) else None
        except TypeError:  # DataPipes and others have a `__len__` that raises
            return None

    @property
    def fingerprint(self) -> str | None:
        """What the dataset says identifies its content, as `fingerprint` or `_fingerprint`."""
        names = ("fingerprint", "_fingerprint")
        known = (getattr(self.source, name, None) for name in names)
        return next((value for value in known if isinstance(value, str)), None)

    def read_first(self) -> list[Any]:
        """Read the first samples; raise PipelineInvalid if a second pass begins with another."""
        if self._first is None:
            once = StreamReader(self, seed=0).first_samples(1)
            self._first = StreamReader(self, seed=0).first_samples(FIRST_SAMPLES)
            if list(map(hash_of_state, once)) != list(map(hash_of_state, self._first[:1])):
                raise PipelineInvalid(
                    "a second pass over this stream begins with another sample than the first; let "
                    "__iter__ begin anew each time, and shuffle by a seed, so that training can "
                    "resume"
                )
        return self._first

    def __len__(self) -> int:
        """Return how many samples are held."""
        return len(self.read_first())

    def __getitem__(self, index: int) -> Any:
        return self.read_first()[index]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_first": None}


class StreamReader(Dataset[Any]):
    """Reads a stream by the sample's number over all passes; going forward is cheap."""

    def __init__(self, stream: Stream, seed: int, pass_length: int | None = None) -> None:
        """Take the number of samples in a pass; None to count them in the first one."""
        self.source: Any = stream.source
        self.seed, self.pass_length = seed, pass_length
        self.generators = own_generators(self.source)
        self.iterator: Iterator[Any] | None = None
        self.pass_number = self.next_index = 0

    def __getitem__(self, index: int) -> Any:
        number = index // self.pass_length if self.pass_length else 0
        if self.iterator is None or index < self.next_index or number > self.pass_number:
            self._begin_pass(number)
        try:
            # The samples between are those of other ranks, or were trained on before a resume.
            while self.next_index <= index:
                sample = self._next_sample()
        except StopIteration:
            samples = self.next_index - self.pass_number * (self.pass_length or 0)
            if not samples or self.pass_length:
                raise StageFailed(
                    f"split 'train' is a stream that ended after {samples} samples in pass "
                    f"{self.pass_number + 1}, expected {self.pass_length or 'at least one'}; give "
                    "as many in each pass, and the same __len__, or none and steps_per_epoch"
                ) from None
            self.pass_length = samples
            return self[index]
        return sample

    def first_samples(self, count: int) -> list[Any]:
        """Return the first samples of the first pass, leaving all generators as they were."""
        samples: list[Any] = []
        with seeded(self.seed, "cpu"), states_restored(self.generators), suppress(StopIteration):
            self._begin_pass(0)
            while len(samples) < count:
                samples.append(self._next_sample())
        return samples

    def _begin_pass(self, number: int) -> None:
        self.pass_number, self.next_index = number, number * (self.pass_length or 0)
        self._seed_generators()
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(number)
        self.iterator = iter(self.source)

    def _next_sample(self) -> Any:
        self._seed_generators()
        sample = next(self.iterator)  # type: ignore[arg-type]  # _begin_pass has made it
        self.next_index += 1
        return sample

    def _seed_generators(self) -> None:
        """Seed by the next sample's number, so that a pass read again draws the same."""
        seed = derive_seed(self.seed, self.next_index)
        reseed(seed, "cpu")
        seed_generators(self.generators, seed)
