"""What every ASGI application of the built-in server does: token, limits, health, metrics."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from compress.serve.http import messages
from compress.serve.http.messages import HttpError, Response, close_if_continue_expected
from compress.serve.http.multiprocess import METRICS_VARIABLE
from compress.serve.worker.tensors import TOO_LARGE, UNREADABLE
from compress.serve.worker.wire import JSON

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from compress.serve.http.dynamic_batcher import WorkerThreads
    from compress.serve.http.messages import Headers, Message, Receive, Send
    from compress.serve.http.options import Limits
    from compress.serve.worker.tensors import Named

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Upper limits of the latency histogram, seconds; 30 is the default time limit of a request."""
LARGE_BODIES = 2
"""Large bodies in memory are bounded by so many times the largest; the others wait in the kernel's
socket buffers."""
SMALL_BYTES = 64 * 1024
"""Larger bodies are parsed, and larger responses serialized, in a thread, one at a time."""
TRIM_SECONDS = 0.1
"""Time until the request of a large body has ended."""
NO_MEMORY = 503, "other large bodies left no memory for this one"
NOT_RECEIVED = 408, "the body was not received"
NOT_READ = 504, "the request was not read"
NOT_ANSWERED = 504, "the model did not answer"
CLIENT_CLOSED = 499
"""Status in the metrics, nginx's, for a client that disconnected before its response."""


class Metrics:
    """Counters of one process, or of all processes of a server."""

    def __init__(self, model: str, depth: Callable[[], float]) -> None:
        """Register every metric; `depth` counts the requests that wait or are being answered."""
        self._registry = CollectorRegistry()
        self._model = model
        self._by_status: dict[int, Counter] = {}
        # With several processes, a scrape reaches one of them, which answers with all their sums.
        self._all_processes = METRICS_VARIABLE in os.environ
        if self._all_processes:
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
        registry = None if self._all_processes else self._registry
        self._requests = Counter(
            "inference_requests",
            "Inference requests, by HTTP status",
            ["model", "status"],
            registry=registry,
        )
        latency = Histogram(
            "inference_request_seconds",
            "Seconds from a request's head to its answer",
            ["model"],
            buckets=BUCKETS,
            registry=registry,
        )
        rows = Counter("inference_rows", "Rows answered", ["model"], registry=registry)
        queue = Gauge(
            "inference_queue_length",
            "Requests that wait or are being answered",
            ["model"],
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._latency, self._rows = latency.labels(model), rows.labels(model)
        self._queue, self._depth = queue.labels(model), depth
        if not self._all_processes:
            self._queue.set_function(depth)

    def add_token_counter(self) -> None:
        """Register the tokens of a decoder's requests."""
        self._tokens = Counter(
            "inference_tokens",
            "Tokens of prompts that were answered, and of the answers",
            ["model", "part"],
            registry=None if self._all_processes else self._registry,
        )

    def count_tokens(self, prompt: int, answer: int) -> None:
        """Count the tokens of an answered request."""
        self._tokens.labels(self._model, "prompt").inc(prompt)
        self._tokens.labels(self._model, "answer").inc(answer)

    def count(self, status: int, rows: int, seconds: float) -> None:
        """Count an inference request."""
        if status not in self._by_status:  # looking up a label takes longer than counting
            self._by_status[status] = self._requests.labels(self._model, str(status))
        self._by_status[status].inc()
        self._latency.observe(seconds)
        if status == 200:
            self._rows.inc(rows)
        if self._all_processes:
            self._queue.set(self._depth())

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class SharedState:
    """What all requests share: limits, worker threads, metrics, and a thread for large bodies."""

    def __init__(self, name: str, workers: WorkerThreads, limits: Limits) -> None:
        """Create it, inside a running event loop; `name` is the model's."""
        self.limits = limits
        self.workers = workers
        self.metrics = Metrics(name, lambda: workers.depth)
        self.in_progress = 0
        """Requests to the model, from reading the body to sending the response."""
        # Python switches back to the event loop every few milliseconds while this thread computes.
        self._thread = ThreadPoolExecutor(1)
        self._large_bodies = ByteSemaphore(LARGE_BODIES * limits.body_bytes)

    def close(self) -> None:
        """End the threads."""
        self._thread.shutdown(cancel_futures=True)
        self.workers.close()

    async def run_in_thread(self, large: bool, work: Callable[..., Any], *args: Any) -> Any:
        """Call a function; a large job in the thread, so that it delays no other request."""
        if not large:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def late_error(self, late: tuple[int, str]) -> HttpError:
        """Return the error of a request that took too long, for one of the constants above."""
        status, what = late
        closing = {} if status == 504 else {"connection": "close"}
        return HttpError(status, f"{what} within {self.limits.seconds:g} s", **closing)

    def body_size(self, headers: Headers) -> int:
        """Return the size of a request's body, or the most that it may be; HttpError above that."""
        limit = self.limits.body_bytes
        # A chunked body does not say its size: it counts as the largest.
        size = limit if "transfer-encoding" in headers else int(headers.get("content-length", 0))
        if size > limit:
            message = f"the body has {size} bytes, expected at most {limit}"
            raise HttpError(TOO_LARGE, message, **close_if_continue_expected(headers))
        return size

    def reserved(self, size: int) -> AbstractAsyncContextManager[None]:
        """Wait until there is memory for a body, and reserve it; for small ones at once."""
        return self._large_bodies.reserve(size) if size > SMALL_BYTES else nullcontext()

    async def read_body(self, receive: Receive) -> bytes | bytearray:
        """Return a request's body; HttpError where it is too large or does not arrive."""
        body, more = bytearray(), True  # not joined from parts, which would take it twice
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                raise HttpError(UNREADABLE, "the client disconnected before its body was received")
            body += part.get("body", b"")
            more = bool(part.get("more_body"))
            # Of a chunked one: others were refused by their Content-Length.
            if len(body) > self.limits.body_bytes:
                message = f"the body has more than {self.limits.body_bytes} bytes"
                raise HttpError(TOO_LARGE, message)
        return body


class BaseApplication:
    """Health, metrics and refusals; subclasses add the paths that ask the model."""

    def __init__(
        self, state: SharedState, token: str, model_paths: Sequence[str], content: dict[str, Named]
    ) -> None:
        """Create the application; `model_paths` ask the model, `content` answers other paths."""
        self.state = state
        self._token = token.encode()
        self._model_paths = tuple(model_paths)
        self._public = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
        self._private: dict[str, Any] = {**content, "/metrics": None}

    def error_response(self, error: Exception) -> Response:
        """Return the response to an error; subclasses write it as their clients expect it."""
        return messages.error_response(error)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = headers_of(scope)
        if scope["path"] in self._model_paths:
            self.state.in_progress += 1
            try:
                await self._ask_model(scope, headers, receive, send)
            finally:
                self.state.in_progress -= 1
            return
        try:
            response = await self._get(scope, headers)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client without one
            response = self.error_response(error)
        await messages.send_response(scope, send, response)

    async def _ask_model(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End what the requests share."""
        self.state.close()

    def accept_whole(self, scope: Message, respond: Callable[[Response], None]) -> Any:
        """Return a `WholeRequest` where no task is needed once its body is received, or None."""
        del scope, respond

    def _admit(self, method: str, headers: Headers, others: int) -> None:
        """Refuse a request without the token, or while too many others wait."""
        self._check_token(headers)
        closing = close_if_continue_expected(headers)
        if method != "POST":
            raise HttpError(405, f"{method[:20]}: expected POST", allow="POST", **closing)
        # Others may still be read, and not be queued yet.
        most = self.state.limits.queue
        if max(self.state.workers.depth, others) >= most:
            message = f"{most} requests wait, the most that may; try again"
            raise HttpError(503, message, retry_after="1", **closing)

    def _check_token(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # In constant time: how long it takes tells nothing of the token.
        is_right = secrets.compare_digest(token.strip(" ").encode(), self._token)
        if scheme.lower() != "bearer" or not is_right:  # RFC 9110, section 11.1
            message = "found no valid token, expected the header Authorization: Bearer TOKEN"
            closing = close_if_continue_expected(headers)
            raise HttpError(401, message, www_authenticate="Bearer", **closing)

    async def _get(self, scope: Message, headers: Headers) -> Response:
        """Answer health, metadata and metrics requests."""
        path, method = scope["path"], scope["method"]
        if path in self._public:
            return self._json_response(self._public[path])
        self._check_token(headers)
        if path not in self._private:
            message = f"{path[:200]}: not here; expected {self._model_paths[0]}"
            raise HttpError(404, message, **close_if_continue_expected(headers))
        if method not in ("GET", "HEAD"):
            message = f"{method[:20]}: expected GET"
            raise HttpError(405, message, allow="GET, HEAD", **close_if_continue_expected(headers))
        if path == "/metrics":
            text = await self.state.run_in_thread(True, self.state.metrics.text)
            return Response(200, text, {"content-type": CONTENT_TYPE_LATEST})
        return self._json_response(self._private[path])

    def _json_response(self, content: Named) -> Response:
        """Return the content; `ready: false` and 503 while every call of the model hangs."""
        hangs = "ready" in content and self.state.workers.hangs(self.state.limits.seconds)
        body = json.dumps({**content, "ready": False} if hangs else content).encode()
        return Response(503 if hangs else 200, body, {"content-type": JSON})


def headers_of(scope: Message) -> Headers:
    """Return a request's headers, their names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


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
