"""Reader: batches of a dataset, read here or by worker processes, the same in either case.

Random numbers drawn while a batch is read (augmentation) follow from the seed and the batch's
place, not from the process that reads it.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from compress.common.dependency_recorder import recording_paused
from compress.common.errors import CompressError, StageFailed, exits_refused
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
    """A data worker's process ended by itself: no fault of the data or of the settings."""


class Reader:
    """A dataset and the workers that read it; they end with the reader."""

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
        """Take a dataset.

        Args:
            dataset: gives samples by index.
            loading: how they are read.
            input_names: order of the inputs of mappings.
            keeps_workers: whether workers live on between calls.
            collate_fn: what becomes of the samples of a batch; a batch of tensors by default.
            records: whether files that the dataset opens count as dependencies; where they do not,
                the samples themselves are hashed.
        """
        self.plan = _Plan()
        workers: dict[str, Any] = {}
        if loading.workers:
            # A rank's own default is to spawn, which would need the user's code on the path.
            workers["multiprocessing_context"] = "fork"
            workers["prefetch_factor"] = loading.prefetch_factor
            workers["persistent_workers"] = keeps_workers and loading.persistent_workers
        self.loader: DataLoader[Any] = DataLoader(
            _Seeded(dataset, records),
            # Its type asks for lists, and whatever it gives is handed to __getitems__.
            batch_sampler=self.plan,  # type: ignore[arg-type]
            collate_fn=collate_fn
            or partial(collate, pad_values=loading.pad_values, input_names=input_names),
            num_workers=loading.workers,
            pin_memory=loading.pin_memory and torch.accelerator.is_available(),
            # The loader draws a number for its workers: not from the generator that training uses.
            generator=torch.Generator().manual_seed(0),
            **workers,
        )

    def read(
        self, order: Sequence[int], batch_size: int, seed: int, first: int = 0
    ) -> Iterator[Any]:
        """Yield the samples of an order in batches, from the first that has not been read.

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
            # The error's traceback would keep the workers alive, and torch has no public way.
            getattr(batches, "_shutdown_workers", lambda: None)()
            self.loader._iterator = None
            raise original_error(error) from error


class _Plan:
    """The batches to read: torch asks for them anew at each beginning."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Sequence[int]]] = []

    def __iter__(self) -> Iterator[tuple[int, Sequence[int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Seeded(Dataset[Any]):
    """A dataset that draws the same random numbers for a batch wherever it is read."""

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
            raise StageFailed(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    words = (str(error).strip().splitlines() or [""])[0]
    return words if isinstance(error, CompressError) else f"{type(error).__name__}: {words}"


def original_error(error: Exception) -> Exception:
    """Return a worker's error without the traceback that torch makes its message."""
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
    words = lines[-1].partition(f"{type(error).__name__}: ")[2] or lines[-1]
    return type(error)(words) if isinstance(error, CompressError) else StageFailed(lines[-1])
