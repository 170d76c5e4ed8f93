"""The Open Inference Protocol v2 as an ASGI application: the built-in server's routes.

It is plain ASGI: a web framework around these few paths took longer than a small model's inference.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from compress import __version__
from serve.http.base_app import (
    CLIENT_CLOSED,
    NO_MEMORY,
    NOT_ANSWERED,
    NOT_READ,
    NOT_RECEIVED,
    SMALL_BYTES,
    BaseApplication,
    headers_of,
)
from serve.http.inference import Inference, WholeRequest
from serve.http.responses import HttpError, Response, response_of, send_response
from serve.worker.oip import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from serve.http.dynamic_batcher import Batcher
    from serve.http.loaded_model import ServedModel
    from serve.http.options import Limits
    from serve.http.responses import Headers, Message, Receive, Send

SPECIAL_HEADERS = frozenset({"expect", "transfer-encoding", "upgrade"})
"""Of requests that `WholeRequest` does not answer."""


class Application(BaseApplication):
    """Answers requests for one model."""

    state: Inference

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits, token: str) -> None:
        """Create the application; all but the two health paths require the bearer token."""
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
        content: dict[str, Any] = {"/v2": server, "/v2/": server, base: metadata}
        content |= {f"{base}/ready": ready, f"{base}/versions/1": metadata}
        content |= {f"{base}/versions/1/ready": ready}
        paths = (f"{base}/infer", f"{base}/versions/1/infer")
        super().__init__(Inference(model, batcher, limits), token, paths, content)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = headers_of(scope)
        if scope["path"] not in self._model_paths:
            await send_response(scope, send, await response_of(self._get(scope, headers)))
            return
        start, count = time.perf_counter(), self.state.metrics.count
        self.state.in_progress += 1
        response = None
        try:
            response = await response_of(self._infer(scope["method"], headers, receive))
            count(response.status, response.rows, time.perf_counter() - start)
            await send_response(scope, send, response)
        except asyncio.CancelledError:
            if response is None:  # else it is counted, and its client left while it was sent
                count(CLIENT_CLOSED, 0, time.perf_counter() - start)
            raise
        finally:
            self.state.in_progress -= 1

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
