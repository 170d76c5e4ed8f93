"""Reader: reads a dataset in batches, in this process or in workers, with the same result.

Random numbers that are drawn while a sample is read (augmentation) follow from the seed and the
sample's index alone: not from the worker or the rank that reads it, nor from what was read before.
"""

from __future__ import annotations

import re
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader, Dataset, get_worker_info

from compress.common.dependency_recorder import recording_paused
from compress.common.errors import CompressError, StageFailed, exits_refused, first_line
from compress.common.process import derive_seed, reseed, seeded
from compress.data.own_generators import (
    draws_nothing,
    own_generators,
    reads_batches,
    seed_generators,
    states_restored,
)
from compress.data.stream import StreamReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from compress.data.loader_config import Loading


# "(pid(s) 7) exited unexpectedly", caused by "(pid 7) is killed by signal: Killed."
DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)(?: exited)?(?:.*signal: ([\w ]+))?", re.DOTALL
)


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
        """Create the loader and, unless they are zero, its worker processes.

        With ``keeps_workers`` these stay alive between calls of :meth:`read`. With ``records``, not
        needed if all samples are hashed, files that the dataset opens are recorded.
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
            collate_fn=_unchanged,
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
    """The batches that a loader reads next; a batch sampler."""

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
        """Read and collate samples; what is drawn meanwhile follows from seed and indices."""
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


def _unchanged(batch: Any) -> Any:
    return batch


def original_error(error: Exception) -> Exception:
    """Return a worker's error without the traceback that torch puts into its message."""
    died = DIED.search(f"{error} {error.__cause__ or error.__context__ or ''}")
    if (died or _is_of_connection(error)) and not isinstance(error, CompressError):
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


def _is_of_connection(error: Exception) -> bool:
    """Whether another process ended while torch took over a tensor of it."""
    if not isinstance(error, EOFError | ConnectionError):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    # A connection of the user's own may end as well, outside of torch's code for tensors.
    return reductions.__file__ in {frame.f_code.co_filename for frame, _ in frames}


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
