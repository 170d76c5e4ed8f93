"""Dynamic batching: worker threads take waiting requests and answer them in one model call."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.serve.worker.tensors import run_batched

if TYPE_CHECKING:
    from compress.profiling.batch_dependence import Call
    from compress.serve.worker.tensors import Array

    Answer = list[Array] | Exception
    """A request's outputs, or what the model raised."""

CLOSE_SECONDS = 5.0  # time limit for all threads to end


@dataclass(slots=True, eq=False)
class Job:
    """A request's inputs, and what is called with its outputs, or with what the model raised."""

    arrays: list[Array]
    rows: int
    row_shapes: tuple[Any, ...]
    """Shape of one row of each input; only jobs with equal ones can share a batch."""
    on_done: Callable[[Answer], None]
    cancelled: bool = False
    """Set if nobody waits for the outputs: it is not run if its turn is yet to come."""


class WorkerThreads:
    """Threads that call a model, and the queue that they take jobs from."""

    def __init__(self, workers: int, jobs: queue.SimpleQueue[Any] | queue.Queue[Any]) -> None:
        """Start the threads, inside a running event loop; each runs :meth:`_work` on a queue."""
        self.depth = 0  # requests that wait or are being answered
        self._call_start: dict[int, float] = {}
        """Start time of the call that each busy thread is in, by thread id."""
        self._loop = asyncio.get_running_loop()
        self._queue = jobs
        # Daemons: a call that never ends must not keep the process from ending.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def hangs(self, seconds: float) -> bool:
        """Return whether every thread has been in the same model call for longer than that."""
        starts = [*self._call_start.values()]
        return len(starts) == len(self._threads) and time.monotonic() - max(starts) > seconds

    def close(self) -> None:
        """End the threads; drop the requests that still wait."""
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        """Do jobs until a None."""
        raise NotImplementedError


class Batcher(WorkerThreads):
    """Answers what queues up during a call by the next one; `delay_seconds` makes requests wait."""

    def __init__(
        self,
        call: Call,
        *,
        workers: int = 1,
        max_rows: int = 128,
        joins_rows: bool = True,
        delay_seconds: float = 0.0,
    ) -> None:
        """Start the threads, inside a running event loop; each may call the model at any time."""
        self._call = call
        self._max_rows = max_rows
        self._joins_rows = joins_rows
        self._delay_seconds = delay_seconds
        self._submitted: list[Job] = []
        """Jobs of this turn of the event loop, on their way to the queue."""
        super().__init__(workers, queue.SimpleQueue())

    def submit(self, arrays: list[Array], on_done: Callable[[Answer], None]) -> Job:
        """Queue a request; `on_done` is called in the event loop, unless the job is cancelled."""
        row_shapes: tuple[Any, ...] = tuple(array.shape[1:] for array in arrays)
        rows = len(arrays[0]) if arrays[0].ndim else 1
        job = Job(arrays, rows, row_shapes, on_done)
        self.depth += 1
        if not self._submitted:
            # What arrives together is queued together: a thread would take the first alone.
            self._loop.call_soon(self._queue_submitted)
        self._submitted.append(job)
        return job

    async def outputs(self, arrays: list[Array]) -> Answer:
        """Return a request's outputs, or what the model raised."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def deliver(outputs: Answer) -> None:
            if not future.done():
                future.set_result(outputs)

        job = self.submit(arrays, deliver)
        try:
            return await future
        finally:
            job.cancelled = True

    def _queue_submitted(self) -> None:
        for job in self._submitted:
            self._queue.put(job)
        self._submitted = []

    def _work(self) -> None:
        job = self._queue.get()
        while job is not None:
            batch, next_job = self._gather(job)
            self._call_start[threading.get_ident()] = time.monotonic()
            live = [each for each in batch if not each.cancelled]
            requests = [each.arrays for each in live]
            results = run_batched(lambda arrays: self._call(*arrays), requests) if live else []
            del self._call_start[threading.get_ident()]
            # Responses are written in the event loop's thread.
            with suppress(RuntimeError):  # the loop is closed: nobody awaits the outputs
                self._loop.call_soon_threadsafe(self._deliver, len(batch), live, results)
            job = next_job or self._queue.get()

    def _gather(self, first: Job) -> tuple[list[Job], Job | None]:
        """Collect a batch; return it, and what was taken from the queue but does not fit in it."""
        batch, rows = [first], first.rows
        deadline = time.monotonic() + self._delay_seconds
        idle = max(1, len(self._threads) - len(self._call_start))
        share = math.ceil((1 + self._queue.qsize()) / idle)  # the others are for the other threads
        while self._joins_rows and rows < self._max_rows:
            if len(batch) >= share and not self._delay_seconds:
                break
            try:
                wait = deadline - time.monotonic() if self._delay_seconds else 0
                job = self._queue.get(timeout=wait) if wait > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                self._queue.put(None)  # which ends this thread, or another, once it has run these
                break
            if job.row_shapes != first.row_shapes or rows + job.rows > self._max_rows:
                return batch, job
            batch.append(job)
            rows += job.rows
        return batch, None

    def _deliver(self, taken: int, jobs: list[Job], results: Sequence[Answer]) -> None:
        self.depth -= taken
        for job, outputs in zip(jobs, results, strict=True):
            if not job.cancelled:
                job.on_done(outputs)
