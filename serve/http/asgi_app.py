"""The Open Inference Protocol v2 as an ASGI application: the built-in server's routes.

It is plain ASGI: a web framework around these few paths took longer than a small model's inference.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from compress import __version__
from serve.http.prometheus import Metrics
from serve.http.responses import (
    HttpError,
    Response,
    close_if_continue_expected,
    response_of,
    send_response,
)
from serve.packaging.model_interface import example_inputs
from serve.worker import wire
from serve.worker.http_errors import TOO_LARGE, UNREADABLE, inference_error, output_fault
from serve.worker.oip import DATATYPES, HEADER_LENGTH, LABELS, requested_outputs
from serve.worker.tensors import check

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from serve.http.dynamic_batcher import Batcher
    from serve.http.loaded_model import ServedModel
    from serve.http.options import Limits
    from serve.http.responses import Headers, Message, Receive, Send
    from serve.packaging.model_interface import Interface
    from serve.worker.tensors import Array, Named, Specs

FORM = "application/x-www-form-urlencoded"
"""The Content-Type of curl's -d where none is given."""
SMALL_BYTES = 64 * 1024
"""Larger bodies are parsed, and larger responses serialized, in a thread, one at a time."""
LARGE_BODIES = 3
"""Large bodies in memory are bounded by so many times the largest; the others wait in the kernel's
socket buffers."""
EXTRA_COMMAS = 1024
"""Commas of a JSON request besides those between numbers, at most."""
CLIENT_CLOSED = 499
"""Status in the metrics, nginx's, for a client that disconnected before its response."""


class Application:
    """Answers requests for one model."""

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits, token: str) -> None:
        """Create the application; all but the two health paths require the bearer token."""
        self.model = model
        self.limits = limits
        self.batcher = batcher
        self.metrics = Metrics(model.name, lambda: batcher.depth)
        self.specs = model.signature.input_descriptions()
        self.outputs = [output.name for output in model.signature.outputs]
        self._example = example_inputs(model.signature, rows=1)
        self._in_progress = 0
        """Inference requests, from reading the body to sending the response."""
        self._large_bodies = ByteSemaphore(LARGE_BODIES * limits.body_bytes)
        self._max_commas = EXTRA_COMMAS + most_numbers(self.specs, limits.rows)
        if wire.TEXT in model.readers:
            self._max_commas += EXTRA_COMMAS * limits.rows  # within texts
        # Python switches back to the event loop every few milliseconds while this thread computes.
        self._thread = ThreadPoolExecutor(1)
        self._authorization = f"Bearer {token}".encode()
        base = f"/v2/models/{model.name}"
        self._infer_paths = (f"{base}/infer", f"{base}/versions/1/infer")
        ready = {"name": model.name, "ready": True}
        metadata = model_metadata(model.name, model.kind, model.interface)
        server: dict[str, Any] = {"name": "compress", "version": __version__}
        server |= {"extensions": ["binary_tensor_data"]}
        self._public = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
        self._private: dict[str, Any] = {"/v2": server, "/v2/": server, base: metadata}
        self._private |= {f"{base}/ready": ready, f"{base}/versions/1": metadata}
        self._private |= {f"{base}/versions/1/ready": ready, "/metrics": None}

    def close(self) -> None:
        """End the thread for large bodies."""
        self._thread.shutdown(cancel_futures=True)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        if scope["path"] not in self._infer_paths:
            await send_response(scope, send, await response_of(self._get(scope, headers)))
            return
        start = time.perf_counter()
        self._in_progress += 1
        try:
            response = await response_of(self._infer(scope["method"], headers, receive))
            self.metrics.count(response.status, response.rows, time.perf_counter() - start)
            await send_response(scope, send, response)
        except asyncio.CancelledError:
            self.metrics.count(CLIENT_CLOSED, 0, time.perf_counter() - start)
            raise
        finally:
            self._in_progress -= 1

    def _check_token(self, headers: Headers) -> None:
        token = headers.get("authorization", "").encode()
        # In constant time: how long it takes tells nothing of the token.
        if not secrets.compare_digest(token, self._authorization):
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
            message = f"{path[:200]}: not here; expected {self._infer_paths[0]}"
            raise HttpError(404, message, **close_if_continue_expected(headers))
        if method not in ("GET", "HEAD"):
            message = f"{method[:20]}: expected GET"
            raise HttpError(405, message, allow="GET, HEAD", **close_if_continue_expected(headers))
        if path == "/metrics":
            text = await self._run_in_thread(True, self.metrics.text)
            return Response(200, text, {"content-type": self.metrics.content_type})
        return self._json_response(self._private[path])

    def _json_response(self, content: Named) -> Response:
        """Return the content; `ready: false` and 503 while every call of the model hangs."""
        hangs = "ready" in content and self.batcher.hangs(self.limits.seconds)
        body = json.dumps({**content, "ready": False} if hangs else content).encode()
        return Response(503 if hangs else 200, body, {"content-type": wire.JSON})

    async def _infer(self, method: str, headers: Headers, receive: Receive) -> Response:
        self._check_token(headers)
        closing = close_if_continue_expected(headers)
        if method != "POST":
            raise HttpError(405, f"{method[:20]}: expected POST", allow="POST", **closing)
        # This request is in progress already. Others may still be read, and not be queued yet.
        if max(self.batcher.depth, self._in_progress - 1) >= self.limits.queue:
            message = f"{self.limits.queue} requests wait, the most that may; try again"
            raise HttpError(503, message, retry_after="1", **closing)
        limit = self.limits.body_bytes
        # A chunked body does not say its size: it counts as the largest.
        size = limit if "transfer-encoding" in headers else int(headers.get("content-length", 0))
        if size > limit:
            message = f"the body has {size} bytes, expected at most {limit}"
            raise HttpError(TOO_LARGE, message, **closing)
        reserved = self._large_bodies.reserve(size) if size > SMALL_BYTES else nullcontext()
        seconds = f"{self.limits.seconds:g} s"
        timeout = (503, f"other large bodies left no memory for this one within {seconds}")
        try:
            async with asyncio.timeout(self.limits.seconds), reserved:
                timeout = (408, f"the body was not received within {seconds}")
                body = await self._read_body(receive)
                # A small image may be millions of pixels.
                in_thread = len(body) > SMALL_BYTES or _content_type(headers) in self.model.readers
                arrays, wanted = await self._run_in_thread(in_thread, self._decode, headers, body)
                timeout = (504, f"the model did not answer within {seconds}")
                outputs = await self._run_model(arrays)
        except TimeoutError:
            closing = {} if timeout[0] == 504 else {"connection": "close"}
            raise HttpError(timeout[0], timeout[1], **closing) from None
        large = sum(output.nbytes for output in outputs) > SMALL_BYTES
        body, written = await self._run_in_thread(large, self._encode, headers, wanted, outputs)
        return Response(200, body, written, len(arrays[0]) if arrays[0].ndim else 1)

    async def _run_in_thread(self, large: bool, work: Callable[..., Any], *args: Any) -> Any:
        """Call a function; a large job in the thread, so that it delays no other request."""
        if not large:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def _run_model(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs; blame a failure on the request if the model answers its example."""
        outputs: list[Array] | Exception
        try:
            outputs = await self.batcher.submit(arrays)
        except Exception as error:  # noqa: BLE001 - runtimes raise what they like
            outputs = error
        failure = output_fault(outputs, self.outputs)
        if not failure and not isinstance(outputs, Exception):
            return outputs
        try:
            works = not output_fault(await self.batcher.submit(self._example), self.outputs)
        except Exception:  # noqa: BLE001 - whatever it is, the model is broken
            works = False
        raise HttpError.from_exception(inference_error(failure, works=works))

    def _decode(self, headers: Headers, body: bytes) -> tuple[list[Array], Named]:
        """Return the model's inputs, and which outputs an Open Inference Protocol request wants."""
        content_type = _content_type(headers)
        if content_type in ("", FORM):
            content_type = wire.JSON  # as the protocol has it; NVIDIA's client sends no type
        json_bytes = headers.get(HEADER_LENGTH, "")
        if json_bytes or content_type == wire.JSON:
            # Counted before it is parsed: numbers take many times their text in memory.
            end = int(json_bytes) if json_bytes.isdecimal() else None
            if body.count(b",", 0, end) > self._max_commas:
                rows = self.limits.rows
                message = f"the body holds more values than {rows} rows of the inputs have"
                raise HttpError(TOO_LARGE, message)
        content: Any = body
        if content_type == wire.JSON and HEADER_LENGTH not in headers:
            # Four times as fast as json, which holds up all other requests; where it fails, json
            # parses again and names the mistake.
            with suppress(ValueError):
                content = from_json(body, allow_inf_nan=False)
        try:
            arrays, asked = wire.decode(
                content, content_type, headers, self.specs, self.model.readers
            )
            check(arrays, self.specs, self.limits.rows)
            if not asked:
                return arrays, {}
            # The protocol's answer holds what the metadata names, and labels if they are requested.
            labels = LABELS if self.model.classes and asked.get("outputs") else ()
            return arrays, requested_outputs(asked, [*self.outputs, *labels])
        except Exception as error:
            raise HttpError.from_exception(error) from error

    def _encode(
        self, headers: Headers, wanted: Named, outputs: list[Array]
    ) -> tuple[bytes, Headers]:
        """Return the response's body and headers: as the protocol or the Accept header says."""
        named = dict(zip(self.outputs, outputs, strict=True))
        accept = headers.get("accept", "").lower()
        try:
            body, written = wire.encode(named, accept, wanted, self.model.name, self.model.classes)
        except ValueError as error:
            raise HttpError.from_exception(error) from error
        if self.model.interface.rows_stay_first:
            written["X-Batch-Axis"] = "0"
        return body, written

    async def _read_body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        bytes_left, more = self.limits.body_bytes, True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                raise HttpError(UNREADABLE, "the client disconnected before its body was received")
            parts.append(part.get("body", b""))
            bytes_left -= len(parts[-1])
            more = bool(part.get("more_body"))
            if bytes_left < 0:  # a chunked one: others were refused by their Content-Length
                message = f"the body has more than {self.limits.body_bytes} bytes"
                raise HttpError(TOO_LARGE, message)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _content_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def model_metadata(name: str, kind: str, interface: Interface) -> dict[str, Any]:
    """Return the response to ``GET /v2/models/{name}``."""
    inputs, outputs = (
        [
            {"name": each.name, "datatype": DATATYPES[each.dtype], "shape": [*each.shape]}
            for each in tensors
        ]
        for tensors in (interface.inputs, interface.outputs)
    )
    described = {"name": name, "versions": ["1"], "platform": kind}
    return described | {"inputs": inputs, "outputs": outputs}


def most_numbers(specs: Specs, rows: int) -> float:
    """Return the most numbers that the inputs of `rows` rows hold; infinite for unbounded axes."""
    # Rows are counted on the first input's first axis, where it has a name.
    row_axis = next(iter(specs[0]["shape"]), None)
    total = 0.0
    for spec in specs:
        bounds = {axis: most or math.inf for axis, (_, most) in spec.get("bounds", {}).items()}
        bounds |= {row_axis: rows}
        sizes = [d if isinstance(d, int) else bounds.get(d, math.inf) for d in spec["shape"]]
        total += math.prod(sizes)
    return total


class ByteSemaphore:
    """Bounds the bytes that requests hold together; the others wait, first in, first out."""

    def __init__(self, capacity: int) -> None:
        """Create a semaphore of so many bytes."""
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

    def _admit(self) -> None:
        while self._queue:
            count, turn = self._queue[0]
            if not turn.cancelled():
                if count > self._free:
                    return
                self._free -= count
                turn.set_result(None)
            self._queue.popleft()
