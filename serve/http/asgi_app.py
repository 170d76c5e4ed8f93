"""The ASGI applications of the built-in server: what all do, and the Open Inference Protocol v2.

It is plain ASGI: a web framework around these few paths took longer than a small model's inference.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
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

from compress import __version__
from compress.profiling.batch_dependence import seeded_rows
from compress.serve.http import messages
from compress.serve.http.helper_process import HelperProcess
from compress.serve.http.messages import HttpError, Response, close_if_continue_expected
from compress.serve.http.multiprocess import METRICS_VARIABLE
from compress.serve.worker import wire
from compress.serve.worker.tensors import (
    TOO_LARGE,
    UNREADABLE,
    describe_error,
    inference_error,
    output_fault,
)
from compress.serve.worker.wire import DATATYPES, JSON, LABELS

if TYPE_CHECKING:
    from compress.serve.http.dynamic_batcher import Batcher, Job, WorkerThreads
    from compress.serve.http.loaded_model import ServedModel
    from compress.serve.http.messages import Headers, Message, Receive, Send
    from compress.serve.http.options import Limits
    from compress.serve.worker.tensors import Array, Named

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
SPECIAL_HEADERS = frozenset({"expect", "transfer-encoding", "upgrade"})
"""Of requests that `WholeRequest` does not answer."""


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
        self.in_progress = 0  # requests to the model, from reading the body to sending the response
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


class Inference(SharedState):
    """The steps of all inference requests, and what they share."""

    workers: Batcher

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits) -> None:
        super().__init__(model.name, batcher, limits)
        self.model = model
        self.outputs = [output.name for output in model.signature.outputs]
        self._example = seeded_rows(model.signature, 1)
        # The protocol's answer holds what the metadata names, and labels if they are requested.
        labels = LABELS if model.classes else ()
        self.decoder = messages.RequestDecoder(model.specs, self.outputs, labels, limits.rows)
        self._helper = None
        if model.forms:
            self._helper = HelperProcess(
                messages.with_readers,
                self.decoder,
                model.forms,
                model.folder,
                what=model.folder,
                seconds=limits.seconds,
                needed_bytes=messages.memory_needed(model.forms, limits),
            )
        self.tasks = set[asyncio.Task[Response]]()

    def close(self) -> None:
        """End the threads, and the helper process."""
        if self._helper:
            self._helper.close()
        super().close()

    async def read(self, headers: Headers, body: bytes | bytearray) -> tuple[list[Array], Named]:
        """Return the inputs in a body, and the outputs that it wants: decoded where it is safe."""
        read: tuple[list[Array], Named]
        if self._helper and self.needs_helper(headers):
            read = await self._helper.call("decode", headers, body=body)
        else:
            large = len(body) > SMALL_BYTES
            read = await self.run_in_thread(large, self.decoder.decode, headers, body)
        return read

    def needs_helper(self, headers: Headers) -> bool:
        """Return whether a body may hold texts or an image."""
        return self._helper is not None and messages.content_type_of(headers) not in wire.TENSORS

    def encode(
        self, headers: Headers, wanted: Named, arrays: list[Array], outputs: list[Array]
    ) -> Response:
        """Return the response: as the protocol or the Accept header says."""
        named = dict(zip(self.outputs, outputs, strict=True))
        accept = headers.get("accept", "").lower()
        try:
            body, written = wire.encode(named, accept, wanted, self.model.name, self.model.classes)
        except ValueError as error:
            raise HttpError(*describe_error(error)) from error
        if self.model.interface.rows_stay_first:
            written["X-Batch-Axis"] = "0"
        return Response(200, body, written, len(arrays[0]) if arrays[0].ndim else 1)

    async def respond(
        self,
        headers: Headers,
        wanted: Named,
        arrays: list[Array],
        outputs: list[Array] | Exception,
    ) -> Response:
        """Return the response with a model's outputs, or the error that its example shows."""
        failure = output_fault(outputs, self.outputs)
        if failure or isinstance(outputs, Exception):
            try:
                async with asyncio.timeout(self.limits.seconds):
                    example = await self.workers.outputs(self._example)
            except TimeoutError:
                raise self.late_error(NOT_ANSWERED) from None
            works = not output_fault(example, self.outputs)
            raise HttpError(*describe_error(inference_error(failure, works=works)))
        response: Response = await self.run_in_thread(
            not is_small(outputs), self.encode, headers, wanted, arrays, outputs
        )
        return response


@dataclass(slots=True, eq=False, repr=False)  # a log must not show the token in its headers
class WholeRequest:
    """One request, from its head to its response, which `_respond` is called with."""

    _inference: Inference
    _headers: Headers
    _respond: Callable[[Response], None]
    _start: float = field(default_factory=time.perf_counter)
    _finished: bool = False
    _job: Job | None = None
    _late: tuple[int, str] = NOT_RECEIVED
    _arrays: list[Array] = field(init=False)
    _wanted: Named = field(init=False)

    def __post_init__(self) -> None:
        self._inference.in_progress += 1

    def run(self, body: bytes) -> None:
        """Decode the body and call the model."""
        inference, self._late = self._inference, NOT_ANSWERED
        try:
            self._arrays, self._wanted = inference.decoder.decode(self._headers, body)
        except Exception as error:  # noqa: BLE001 - the parser called this
            self._finish(messages.error_response(error))
            return
        self._job = inference.workers.submit(self._arrays, self._encode)

    def expire(self) -> None:
        """Answer that the body, or the model's answer, was not there in time."""
        self._drop()
        self._finish(self._inference.late_error(self._late).response)

    def cancel(self) -> None:
        """Drop the request: its client has disconnected."""
        self._drop()
        if not self._finished:
            self._count(CLIENT_CLOSED, 0)

    def _drop(self) -> None:
        if self._job is not None:
            self._job.cancelled = True

    def _encode(self, outputs: list[Array] | Exception) -> None:
        inference = self._inference
        self._job = None  # it refers to this request, which would wait for the garbage collector
        if (
            not isinstance(outputs, Exception)
            and not output_fault(outputs, inference.outputs)
            and is_small(outputs)
        ):
            try:
                response = inference.encode(self._headers, self._wanted, self._arrays, outputs)
            except Exception as error:  # noqa: BLE001 - others of the batch are yet to come
                response = messages.error_response(error)
            self._finish(response)
            return
        respond = inference.respond(self._headers, self._wanted, self._arrays, outputs)
        task = asyncio.get_running_loop().create_task(messages.response_of(respond))
        inference.tasks.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[Response]) -> None:
        self._inference.tasks.discard(task)
        if not task.cancelled():
            self._finish(task.result())

    def _finish(self, response: Response) -> None:
        if not self._finished:
            self._count(response.status, response.rows)
            self._respond(response)

    def _count(self, status: int, rows: int) -> None:
        self._finished = True
        self._inference.in_progress -= 1
        seconds = time.perf_counter() - self._start
        self._inference.metrics.count(status, rows, seconds)


def is_small(outputs: Sequence[Array]) -> bool:
    """Return whether outputs may be written without a thread."""
    return sum(output.nbytes for output in outputs) <= SMALL_BYTES


class Application(BaseApplication):
    """Answers requests for one model."""

    state: Inference

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits, token: str) -> None:
        base = f"/v2/models/{model.name}"
        ready = {"name": model.name, "ready": True}
        inputs, outputs = (
            [
                {"name": each.name, "datatype": DATATYPES[each.dtype], "shape": [*each.shape]}
                for each in tensors
            ]
            for tensors in (model.interface.inputs, model.interface.outputs)
        )
        described = {"name": model.name, "versions": ["1"], "platform": model.kind}
        metadata = described | {"inputs": inputs, "outputs": outputs}
        server: dict[str, Any] = {"name": "compress", "version": __version__}
        server |= {"extensions": ["binary_tensor_data"]}
        content: dict[str, Any] = {"/v2": server, "/v2/": server}
        for path in (base, f"{base}/versions/1"):
            content |= {path: metadata, f"{path}/ready": ready}
        paths = (f"{base}/infer", f"{base}/versions/1/infer")
        super().__init__(Inference(model, batcher, limits), token, paths, content)

    async def _ask_model(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> None:
        start, count = time.perf_counter(), self.state.metrics.count
        response = None
        try:
            response = await messages.response_of(self._infer(scope["method"], headers, receive))
            count(response.status, response.rows, time.perf_counter() - start)
            await messages.send_response(scope, send, response)
        except asyncio.CancelledError:
            if response is None:  # else it is counted, and its client left while it was sent
                count(CLIENT_CLOSED, 0, time.perf_counter() - start)
            raise

    def accept_whole(
        self, scope: Message, respond: Callable[[Response], None]
    ) -> WholeRequest | None:
        """Return a small inference request that may begin once its body is received, else None."""
        if scope["method"] != "POST" or scope["path"] not in self._model_paths:
            return None
        headers, limit = headers_of(scope), self.state.limits.body_bytes
        if (
            not 0 < int(headers.get("content-length", 0)) <= min(SMALL_BYTES, limit)
            or not SPECIAL_HEADERS.isdisjoint(headers)
            or self.state.needs_helper(headers)
        ):
            return None
        try:
            self._admit("POST", headers, self.state.in_progress)
        except HttpError:
            return None  # the error is sent before the body is received
        return WholeRequest(self.state, headers, respond)

    async def _infer(self, method: str, headers: Headers, receive: Receive) -> Response:
        inference = self.state
        # This request is in progress already.
        self._admit(method, headers, inference.in_progress - 1)
        size = inference.body_size(headers)
        late = NO_MEMORY
        try:
            async with asyncio.timeout(inference.limits.seconds), inference.reserved(size):
                late = NOT_RECEIVED
                body = await inference.read_body(receive)
                late = NOT_READ
                arrays, wanted = await inference.read(headers, body)
                late = NOT_ANSWERED
                outputs = await inference.workers.outputs(arrays)
        except TimeoutError:
            raise inference.late_error(late) from None
        return await inference.respond(headers, wanted, arrays, outputs)
