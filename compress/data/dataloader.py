"""Reader: reads a dataset in batches, in this process or in workers, with the same result.

Random numbers drawn while a batch is read (augmentation) depend on the seed and the batch's
position, not on the process that reads it.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from compress.common.dependency_recorder import recording_paused
from compress.common.errors import CompressError, StageFailed, exits_refused, first_line
from compress.common.process import derive_seed, seeded
from compress.data.batch import collate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        input_names: Sequence[str] = (),
        *,
        keeps_workers: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        records: bool = False,
    ) -> None:
        """Create the loader and, unless they are zero, its worker processes.

        Args:
            dataset: returns samples by index.
            loading: settings of the loader.
            input_names: order of the inputs of mappings.
            keeps_workers: whether workers stay alive between calls of :meth:`read`.
            collate_fn: turns the samples of a batch into a value; a :class:`Batch` by default.
            records: whether files that the dataset opens are recorded as dependencies; not needed
                if all samples are hashed.
        """
        self.plan = _BatchPlan()
        workers: dict[str, Any] = {}
        if loading.workers:
            # Processes started by spawn would need the user's code on sys.path.
            workers["multiprocessing_context"] = "fork"
            workers["prefetch_factor"] = loading.prefetch_factor
            workers["persistent_workers"] = keeps_workers and loading.persistent_workers
        self.loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, records),
            # Typed as lists of indices; each item is passed to __getitems__ unchanged.
            batch_sampler=self.plan,  # type: ignore[arg-type]
            collate_fn=collate_fn
            or partial(collate, pad_values=loading.pad_values, input_names=input_names),
            num_workers=loading.workers,
            pin_memory=loading.pin_memory and torch.accelerator.is_available(),
            # The loader draws a seed for its workers, which must not change training's generator.
            generator=torch.Generator().manual_seed(0),
            **workers,
        )

    def read(
        self, order: Sequence[int], batch_size: int, seed: int, first: int = 0
    ) -> Iterator[Any]:
        """Yield the samples with the given indices in batches, from position ``first`` on.

        Raises:
            WorkerEnded: a worker's process ended.
            StageFailed: reading failed in a worker.
        """
        self.plan.batches = [
            (derive_seed(seed, start), order[start : start + batch_size])
            for start in range(first, len(order), batch_size)
        ]
        batches = iter(self.loader)
        try:
            yield from batches
        except Exception as error:
            # The error's traceback would keep the workers alive; torch has no public stop.
            getattr(batches, "_shutdown_workers", lambda: None)()
            self.loader._iterator = None
            raise original_error(error) from error


class _BatchPlan:
    """Batch sampler whose batches are set before each iteration, so that workers can stay alive."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Sequence[int]]] = []

    def __iter__(self) -> Iterator[tuple[int, Sequence[int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Seeded(Dataset[Any]):
    """A dataset that seeds the generators for each batch, in whatever process it is read."""

    def __init__(self, dataset: Dataset[Any], records: bool) -> None:
        self.dataset, self.records = dataset, records

    def __getitems__(self, batch: tuple[int, Sequence[int]]) -> list[Any]:
        seed, indices = batch
        try:
            recorder = nullcontext() if self.records else recording_paused()
            with exits_refused(), seeded(seed, "cpu"), recorder:
                if hasattr(self.dataset, "__getitems__"):
                    return list(self.dataset.__getitems__(list(indices)))
                return [self.dataset[index] for index in indices]
        except Exception as error:
            if get_worker_info() is None:
                raise
            message = first_line(error)
            if not isinstance(error, CompressError):
                message = f"{type(error).__name__}: {message}"
            raise StageFailed(message) from error


def original_error(error: Exception) -> Exception:
    """Return a worker's error without the traceback that torch puts into its message."""
    died = DIED.search(f"{error} {error.__cause__ or error.__context__ or ''}")
    if died and not isinstance(error, CompressError):
        how = f"was killed by signal: {died[2]}" if died[2] else "ended unexpectedly"
        return WorkerEnded(
            f"a data worker (pid {died[1]}) {how}; perhaps memory ran out: lower "
            "data.loader.workers or data.loader.prefetch_factor"
        )
    lines = str(error).strip().splitlines()
    if not lines or "in DataLoader worker process" not in lines[0]:
        return error
    message = lines[-1].partition(f"{type(error).__name__}: ")[2] or lines[-1]
    return type(error)(message) if isinstance(error, CompressError) else StageFailed(lines[-1])
