"""Joining requests that wait: worker threads take what is queued, and answer it in one call."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve.worker.batching import together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.profiling.batch_dependence import Call
    from serve.worker.tensors import Array

JOIN_SECONDS = 5.0
"""How long all threads together may take to end."""


@dataclass(slots=True, eq=False)
class Job:
    """A request's inputs, and where its outputs are awaited."""

    arrays: list[Array]
    rows: int
    alike: tuple[Any, ...]
    """Requests that have the same here may be joined."""
    future: asyncio.Future[list[Array]]


class End:
    """What ends a worker that finds it in the queue."""


class Batcher:
    """Worker threads, and the queue they take from.

    Nothing waits for company unless ``delay_seconds`` says so: while a call runs, others queue up,
    and the next call takes as many of them as fit.
    """

    def __init__(
        self,
        call: Call,
        *,
        workers: int = 1,
        max_rows: int = 128,
        joins_rows: bool = True,
        delay_seconds: float = 0.0,
    ) -> None:
        """Start the threads; call this where the event loop runs.

        Args:
            call: the model; it may be called from several threads.
            workers: number of threads.
            max_rows: rows of one call.
            joins_rows: whether requests may be joined at all.
            delay_seconds: how long a request waits for others.
        """
        self.depth = 0
        """Requests that wait or are being answered."""
        self._call = call
        self._max_rows = max_rows
        self._joins_rows = joins_rows
        self._delay_seconds = delay_seconds
        self._began: dict[int, float] = {}
        """When each thread's call began, of those that are in one."""
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[Job | End] = queue.SimpleQueue()
        # Daemons: a call that never ends must not keep the process from ending.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, arrays: list[Array]) -> asyncio.Future[list[Array]]:
        """Queue a request; what is cancelled before its turn is not run."""
        alike: tuple[Any, ...] = tuple(array.shape[1:] for array in arrays)
        rows = len(arrays[0]) if arrays[0].ndim else 1
        future = self._loop.create_future()
        self.depth += 1
        self._queue.put(Job(arrays, rows, alike, future))
        return future

    def hangs(self, seconds: float) -> bool:
        """Return whether every thread has been in one call of the model for longer than that."""
        began = [*self._began.values()]
        return len(began) == len(self._threads) and time.monotonic() - max(began) > seconds

    def close(self) -> None:
        """End the threads; what still waits is dropped."""
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(End())
        due = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, due - time.monotonic()))

    def _work(self) -> None:
        job = self._queue.get()
        while isinstance(job, Job):
            batch, held = self._gather(job)
            self._began[threading.get_ident()] = time.monotonic()
            done = answer(self._call, batch)
            del self._began[threading.get_ident()]
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver, batch, done)
            job = held or self._queue.get()

    def _gather(self, first: Job) -> tuple[list[Job], Job | End | None]:
        """Return what is answered together, and what was taken from the queue and is not."""
        batch, rows = [first], first.rows
        due = time.monotonic() + self._delay_seconds
        while self._joins_rows and rows < self._max_rows:
            try:
                wait = due - time.monotonic() if self._delay_seconds else 0
                job = self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(job, End):
                return batch, job
            if job.alike != first.alike or rows + job.rows > self._max_rows:
                return batch, job
            batch.append(job)
            rows += job.rows
        return batch, None

    def _deliver(self, batch: list[Job], done: Sequence[list[Array] | Exception | None]) -> None:
        self.depth -= len(batch)
        for job, outputs in zip(batch, done, strict=True):
            if job.future.done():
                continue
            if isinstance(outputs, Exception):
                job.future.set_exception(outputs)
            elif outputs is not None:
                job.future.set_result(outputs)


def answer(call: Call, batch: Sequence[Job]) -> list[list[Array] | Exception | None]:
    """Return each request's outputs, or what went wrong with it; None for those given up."""
    live = [job for job in batch if not job.future.done()]
    answers = together(lambda arrays: call(*arrays), [job.arrays for job in live]) if live else []
    done = dict(zip(map(id, live), answers, strict=True))
    return [done.get(id(job)) for job in batch]
