"""The built-in server's answers: Open Inference Protocol v2 as an ASGI application.

It is plain ASGI: a framework around these few paths cost more than a small model's answer.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from compress import __version__
from serve.http.byte_semaphore import ByteSemaphore
from serve.http.prometheus import Metrics
from serve.http.responses import Answer, Refused, attempted, refused, send_answer, unread
from serve.packaging import oip_metadata
from serve.packaging.model_interface import example
from serve.worker import wire
from serve.worker.http_errors import TOO_LARGE, UNREADABLE, blame, what_failed
from serve.worker.oip import HEADER_LENGTH, wanted_of
from serve.worker.tensors import check

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from serve.http.dynamic_batcher import Batcher
    from serve.http.loaded_model import ServedModel
    from serve.http.options import Limits
    from serve.http.responses import Headers, Message, Receive, Send
    from serve.worker.tensors import Array, Named, Specs

FORM = "application/x-www-form-urlencoded"
"""What curl's -d sends where no type is given."""
SHORT_BYTES = 64 * 1024
"""Longer bodies are read, and longer answers written, by a thread, one at a time."""
BODIES_HELD = 3
"""Longer bodies that are read or answered may together have so many times the size of the largest;
the others wait in the kernel's buffers."""
OTHER_COMMAS = 1024
"""In a request of the Open Inference Protocol, besides those between numbers."""
LEFT = 499
"""Counted, as nginx does, for a client that left before it was answered."""


class Application:
    """Answers requests for one model."""

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits, token: str) -> None:
        """Remember what to serve.

        Args:
            model: the model, proven and warm.
            batcher: answers with it.
            limits: what is refused.
            token: what clients must know, for all but the two paths of health.
        """
        self.model = model
        self.limits = limits
        self.batcher = batcher
        self.metrics = Metrics(model.name, lambda: batcher.depth)
        self.specs = model.signature.input_descriptions()
        self.outputs = [output.name for output in model.signature.outputs]
        self._example = example(model.signature, rows=1)
        self._inside = 0
        """Inference requests whose body is read, which are answered, or whose answer is sent."""
        self._large_bodies = ByteSemaphore(BODIES_HELD * limits.body_bytes)
        self._most_commas = OTHER_COMMAS + most_numbers(self.specs, limits.rows)
        # Python lets the event loop go on every few milliseconds while this one thread computes.
        self._thread = ThreadPoolExecutor(1)
        self._authorization = f"Bearer {token}".encode()
        base = f"/v2/models/{model.name}"
        self._infer_paths = (f"{base}/infer", f"{base}/versions/1/infer")
        ready = {"name": model.name, "ready": True}
        metadata = oip_metadata.model_metadata(model.name, model.kind, model.interface)
        server: dict[str, Any] = {"name": "compress", "version": __version__}
        server |= {"extensions": [*oip_metadata.EXTENSIONS]}
        self._open = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
        self._told: dict[str, Any] = {"/v2": server, "/v2/": server, base: metadata}
        self._told |= {f"{base}/ready": ready, f"{base}/versions/1": metadata}
        self._told |= {f"{base}/versions/1/ready": ready, "/metrics": None}

    def close(self) -> None:
        """End the thread that reads and writes what is large."""
        self._thread.shutdown(cancel_futures=True)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        if scope["path"] not in self._infer_paths:
            await send_answer(scope, send, await attempted(self._told_of(scope, headers)))
            return
        began = time.perf_counter()
        self._inside += 1
        try:
            answer = await attempted(self._infer(scope["method"], headers, receive))
            self.metrics.count(answer.status, answer.rows, time.perf_counter() - began)
            await send_answer(scope, send, answer)
        except asyncio.CancelledError:
            self.metrics.count(LEFT, 0, time.perf_counter() - began)
            raise
        finally:
            self._inside -= 1

    def _refuse_stranger(self, headers: Headers) -> None:
        given = headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, self._authorization):
            message = "found no valid token, expected the header Authorization: Bearer TOKEN"
            raise Refused(401, message, www_authenticate="Bearer", **unread(headers))

    async def _told_of(self, scope: Message, headers: Headers) -> Answer:
        """Return what is told of the server and the model."""
        path, method = scope["path"], scope["method"]
        if path in self._open:
            return self._state(self._open[path])
        self._refuse_stranger(headers)
        if path not in self._told:
            message = f"{path[:200]}: not here; expected {self._infer_paths[0]}"
            raise Refused(404, message, **unread(headers))
        if method not in ("GET", "HEAD"):
            message = f"{method[:20]}: expected GET"
            raise Refused(405, message, allow="GET, HEAD", **unread(headers))
        if path == "/metrics":
            text = await self._in_thread(True, self.metrics.text)
            return Answer(200, text, {"content-type": self.metrics.content_type})
        return self._state(self._told[path])

    def _state(self, told: Named) -> Answer:
        """Return what is told of the server: not ready, while every call of the model hangs."""
        hangs = "ready" in told and self.batcher.hangs(self.limits.seconds)
        body = json.dumps({**told, "ready": False} if hangs else told).encode()
        return Answer(503 if hangs else 200, body, {"content-type": wire.JSON})

    async def _infer(self, method: str, headers: Headers, receive: Receive) -> Answer:
        self._refuse_stranger(headers)
        if method != "POST":
            raise Refused(405, f"{method[:20]}: expected POST", allow="POST", **unread(headers))
        if max(self.batcher.depth, self._inside - 1) >= self.limits.queue:
            message = f"{self.limits.queue} requests wait, which is all that may; try again"
            raise Refused(503, message, retry_after="1", **unread(headers))
        late = (503, f"there was no room for the body within {self.limits.seconds:g} s")
        room = self._room_for(headers)
        try:
            async with asyncio.timeout(self.limits.seconds), room:
                late = (408, f"the body was not here after {self.limits.seconds:g} s")
                body = await self._body(receive)
                arrays, wanted = await self._in_thread(
                    len(body) > SHORT_BYTES, self._understood, headers, body
                )
                late = (504, f"the model did not answer within {self.limits.seconds:g} s")
                outputs = await self._answered(arrays)
        except TimeoutError:
            closing = {} if late[0] == 504 else {"connection": "close"}
            raise Refused(late[0], late[1], **closing) from None
        large = sum(output.nbytes for output in outputs) > SHORT_BYTES
        body, written = await self._in_thread(large, self._written, headers, wanted, outputs)
        return Answer(200, body, written, len(arrays[0]) if arrays[0].ndim else 1)

    def _room_for(self, headers: Headers) -> AbstractAsyncContextManager[None]:
        """Return what waits until a body may be read: not at all, if it is short."""
        limit = self.limits.body_bytes
        size = limit if "transfer-encoding" in headers else int(headers.get("content-length", 0))
        if size > limit:
            message = f"the body has {size} bytes, expected at most {limit}"
            raise Refused(TOO_LARGE, message, **unread(headers))
        return self._large_bodies.holding(size) if size > SHORT_BYTES else nullcontext()

    async def _in_thread(self, large: bool, work: Callable[..., Any], *given: Any) -> Any:
        """Do what may take long where it does not hold up other requests."""
        if not large:
            return work(*given)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    async def _answered(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs; a failure is the request's, where the model still works."""
        outputs: list[Array] | Exception
        try:
            outputs = await self.batcher.submit(arrays)
        except Exception as error:  # noqa: BLE001 - runtimes raise what they like
            outputs = error
        what = what_failed(outputs, self.outputs)
        if what or isinstance(outputs, Exception):
            raise refused(blame(what, works=await self._works()))
        return outputs

    async def _works(self) -> bool:
        """Return whether the model answers its example."""
        try:
            outputs = await self.batcher.submit(self._example)
        except Exception:  # noqa: BLE001 - whatever it is, the model is broken
            return False
        return not what_failed(outputs, self.outputs)

    def _understood(self, headers: Headers, body: bytes) -> tuple[list[Array], Named]:
        """Return what the model can be given, and how a request of the protocol is answered."""
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type in ("", FORM):
            content_type = wire.JSON  # as the protocol has it; NVIDIA's client sends no type
        self._refuse_many(headers, content_type, body)
        given: Any = body
        if content_type == wire.JSON and HEADER_LENGTH not in headers:
            # Four times as fast as json, which holds up all others; what it refuses, json names.
            with suppress(ValueError):
                given = from_json(body, allow_inf_nan=False)
        try:
            arrays, asked = wire.decode(given, content_type, headers, self.specs, {})
            check(arrays, self.specs, self.limits.rows)
            return arrays, wanted_of(asked, self.outputs) if asked else {}
        except Exception as error:
            raise refused(error) from error

    def _refuse_many(self, headers: Headers, content_type: str, body: bytes) -> None:
        """Refuse JSON of more values than the inputs have, before it is parsed."""
        length = headers.get(HEADER_LENGTH, "")
        if not length and content_type != wire.JSON:
            return
        if body.count(b",", 0, int(length) if length.isdecimal() else None) > self._most_commas:
            message = f"the body holds more values than {self.limits.rows} rows of the inputs have"
            raise Refused(TOO_LARGE, message)

    def _written(
        self, headers: Headers, wanted: Named, outputs: list[Array]
    ) -> tuple[bytes, Headers]:
        """Return the answer's body and headers: by the protocol, or as Accept says."""
        named = dict(zip(self.outputs, outputs, strict=True))
        accept = headers.get("accept", "").lower()
        try:
            body, written = wire.encode(named, accept, wanted, self.model.name, None)
        except ValueError as error:
            raise refused(error) from error
        if self.model.interface.rows_stay_first:
            written["X-Batch-Axis"] = "0"
        return body, written

    async def _body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        left, more = self.limits.body_bytes, True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                raise Refused(UNREADABLE, "the client left before its body was here")
            parts.append(part.get("body", b""))
            left -= len(parts[-1])
            more = bool(part.get("more_body"))
            if left < 0:
                message = f"the body has more than {self.limits.body_bytes} bytes"
                raise Refused(TOO_LARGE, message)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def most_numbers(specs: Specs, rows: int) -> float:
    """Return how many numbers the inputs of so many rows have; infinite where an axis is unbounded.

    Args:
        specs: the inputs, with the bounds of their axes.
        rows: size of the first input's first axis, where it has a name.
    """
    row_axis = next(iter(specs[0]["shape"]), None)
    total = 0.0
    for spec in specs:
        bounds = {axis: most or math.inf for axis, (_, most) in spec.get("bounds", {}).items()}
        bounds |= {row_axis: rows}
        sizes = [d if isinstance(d, int) else bounds.get(d, math.inf) for d in spec["shape"]]
        total += math.prod(sizes)
    return total
