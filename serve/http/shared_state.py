"""What requests share: the token, metrics and memory of a process, and a model's threads."""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client import generate_latest as metrics_text
from prometheus_client.multiprocess import MultiProcessCollector

from compress.serve.http import messages
from compress.serve.http.messages import HttpError, close_if_continue_expected
from compress.serve.http.multiprocess import METRICS_VARIABLE
from compress.serve.worker.tensors import TOO_LARGE, UNREADABLE

if TYPE_CHECKING:
    from compress.serve.http.dynamic_batcher import WorkerThreads
    from compress.serve.http.messages import Headers, Message, Receive, Response, Send
    from compress.serve.http.options import Limits
    from compress.serve.http.tracing import Tracing
    from compress.serve.worker.tensors import Named

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Upper limits of the latency histogram, seconds; 30 is the default time limit of a request."""
LARGE_BODIES = 2
"""Large bodies in memory are bounded by so many times the largest; the others wait in the kernel's
socket buffers."""
SMALL_BYTES = 64 * 1024  # larger bodies are read, and responses written, in a thread, one at a time
TRIM_SECONDS = 0.1  # time until the request of a large body has ended
NO_MEMORY = 503, "other large bodies left no memory for this one"
NOT_RECEIVED = 408, "the body was not received"
NOT_READ = 504, "the request was not read"
NOT_ANSWERED = 504, "the model did not answer"
CLIENT_CLOSED = 499  # nginx's status for a client that disconnected before its response
MODEL = ["model", "version"]


class Metrics:
    """Counters of one process, or of all processes of a server, by model and version."""

    def __init__(self) -> None:
        """Register every metric."""
        self.registry = CollectorRegistry()
        # With several processes, a scrape reaches one of them, which answers with all their sums.
        self.all_processes = METRICS_VARIABLE in os.environ
        if self.all_processes:
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self.registry)
        registry = None if self.all_processes else self.registry
        what = "Inference requests, by HTTP status"
        self.requests = Counter("inference_requests", what, [*MODEL, "status"], registry=registry)
        self.latency = Histogram(
            "inference_request_seconds",
            "Seconds from a request's head to its answer",
            MODEL,
            buckets=BUCKETS,
            registry=registry,
        )
        self.rows = Counter("inference_rows", "Rows answered", MODEL, registry=registry)
        self.queue = Gauge(
            "inference_queue_length",
            "Requests that wait or are being answered",
            MODEL,
            multiprocess_mode="livesum",
            registry=registry,
        )
        what = "Tokens of prompts that were answered, and of the answers"
        self.tokens = Counter("inference_tokens", what, [*MODEL, "part"], registry=registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return metrics_text(self.registry)


class SharedState:
    """What all requests to a server process share: limits, token, metrics, and memory of bodies."""

    def __init__(self, limits: Limits, token: str, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self.metrics = Metrics()
        self._token = token.encode()
        # Python switches back to the event loop every few milliseconds while this thread computes.
        self._thread = ThreadPoolExecutor(1)
        self._large_bodies = ByteSemaphore(LARGE_BODIES * limits.body_bytes)

    def close(self) -> None:
        """End the thread, and send the last traces."""
        self._thread.shutdown(cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()

    def check_token(self, headers: Headers) -> None:
        """Raise HttpError unless a request has the server's token."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # In constant time: how long it takes tells nothing of the token.
        is_right = secrets.compare_digest(token.strip(" ").encode(), self._token)
        if scheme.lower() != "bearer" or not is_right:  # RFC 9110, section 11.1
            message = "found no valid token, expected the header Authorization: Bearer TOKEN"
            closing = close_if_continue_expected(headers)
            raise HttpError(401, message, www_authenticate="Bearer", **closing)

    async def run_in_thread(self, large: bool, work: Callable[..., Any], *args: Any) -> Any:
        """Call a function; a large job in the thread, so that it delays no other request."""
        if not large:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def reserved(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait until there is memory for a body, and reserve it; for small ones at once."""
        return self._large_bodies.reserve(size) if size > SMALL_BYTES else nullcontext()


class Served:
    """One version of a loaded model, and the requests to it; subclasses answer them."""

    prefix: ClassVar[str]
    """With which the addresses that subclasses answer begin."""
    error_response: Callable[[Exception], Response] = staticmethod(messages.error_response)
    """Returns the response to an error, as clients of these addresses expect it."""

    def __init__(
        self, name: str, version: str, workers: WorkerThreads, limits: Limits, shared: SharedState
    ) -> None:
        self.name, self.version = name, version
        self.workers, self.limits, self.shared = workers, limits, shared
        labels, metrics = (name, version), shared.metrics
        self._latency, self._rows = metrics.latency.labels(*labels), metrics.rows.labels(*labels)
        self._queue = metrics.queue.labels(*labels)
        self._by_status: dict[int, Counter] = {}
        if not metrics.all_processes:
            alive = weakref.ref(workers)  # the metrics outlive a version that is unloaded
            self._queue.set_function(lambda: found.depth if (found := alive()) else 0)
        self.in_progress = 0  # requests, from reading the body to sending the response
        self.resources = ExitStack()
        """What is closed behind the last request: threads, processes, the model."""

    def addresses(self, *, of_version: bool) -> list[str]:
        """Return the paths of requests to the model: those of this version, or without one."""
        raise NotImplementedError

    def pages(self, versions: list[str], *, of_version: bool) -> dict[str, Named]:
        """Return what describes the model, by path; `versions` of it can be asked."""
        raise NotImplementedError

    async def answer(self, scope: Message, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer a request to one of the addresses."""
        raise NotImplementedError

    def accept_whole(self, path: str, headers: Headers, respond: Callable[[Response], None]) -> Any:
        """Return a `WholeRequest` where no task is needed once its body is received, or None."""

    def is_ready(self) -> bool:
        """Return False while every call of the model has taken longer than a request may."""
        return not self.workers.hangs(self.limits.seconds)

    def close(self) -> None:
        """End the threads, and all that belongs to the model."""
        with self.resources:
            self.workers.close()

    def admit(self, method: str, headers: Headers, others: int) -> None:
        """Refuse a request without the token, or while too many others wait."""
        self.shared.check_token(headers)
        closing = close_if_continue_expected(headers)
        if method != "POST":
            raise HttpError(405, f"{method[:20]}: expected POST", allow="POST", **closing)
        # Others may still be read, and not be queued yet.
        most = self.limits.queue
        if max(self.workers.depth, others) >= most:
            message = f"{most} requests wait, the most that may; try again"
            raise HttpError(503, message, retry_after="1", **closing)

    def record(self, headers: Headers, status: int, rows: int, start: float) -> None:
        """Count a request that began at `start`, of `time.perf_counter`, and trace it."""
        seconds, metrics = time.perf_counter() - start, self.shared.metrics
        if status not in self._by_status:  # looking up a label takes longer than counting
            labels = self.name, self.version, str(status)
            self._by_status[status] = metrics.requests.labels(*labels)
        self._by_status[status].inc()
        self._latency.observe(seconds)
        if status == 200:
            self._rows.inc(rows)
        if metrics.all_processes:
            self._queue.set(self.workers.depth)
        if self.shared.tracing is not None:
            self.shared.tracing.record(self.name, self.version, headers, status, seconds)

    def late_error(self, late: tuple[int, str]) -> HttpError:
        """Return the error of a request that took too long, for one of the constants above."""
        status, what = late
        closing = {} if status == 504 else {"connection": "close"}
        return HttpError(status, f"{what} within {self.limits.seconds:g} s", **closing)


def body_size(headers: Headers, limit: int) -> int:
    """Return the size of a request's body, or the most that it may be; HttpError above that."""
    # A chunked body does not say its size: it counts as the largest.
    size = limit if "transfer-encoding" in headers else int(headers.get("content-length", 0))
    if size > limit:
        message = f"the body has {size} bytes, expected at most {limit}"
        raise HttpError(TOO_LARGE, message, **close_if_continue_expected(headers))
    return size


async def read_body(receive: Receive, limit: int) -> bytes | bytearray:
    """Return a request's body; HttpError where it is too large or does not arrive."""
    body, more = bytearray(), True  # not joined from parts, which would take it twice
    while more:
        part = await receive()
        if part["type"] == "http.disconnect":
            raise HttpError(UNREADABLE, "the client disconnected before its body was received")
        body += part.get("body", b"")
        more = bool(part.get("more_body"))
        # Of a chunked one: others were refused by their Content-Length.
        if len(body) > limit:
            raise HttpError(TOO_LARGE, f"the body has more than {limit} bytes")
    return body


class ByteSemaphore:
    """Bounds the bytes that requests hold together; the others wait, first in, first out."""

    def __init__(self, capacity: int) -> None:
        self._capacity = self._free = capacity
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator[None]:
        """Wait until `count` bytes are free, at most the capacity, and reserve them."""
        count = min(count, self._capacity)  # more would never be free
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            # Also after a cancellation: before the turn came, or in it.
            if turn.done() and not turn.cancelled():
                self._free += count
            else:
                turn.cancel()
            self._admit()
            # malloc keeps what is freed between other objects, until it is asked.
            asyncio.get_running_loop().call_later(TRIM_SECONDS, ctypes.CDLL(None).malloc_trim, 0)

    def _admit(self) -> None:
        while self._queue:
            count, turn = self._queue[0]
            if not turn.cancelled():
                if count > self._free:
                    return
                self._free -= count
                turn.set_result(None)
            self._queue.popleft()
