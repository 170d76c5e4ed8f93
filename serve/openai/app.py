"""OpenAI's `/v1/completions` and `/v1/chat/completions` as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from serve.http.base_app import (
    CLIENT_CLOSED,
    NO_MEMORY,
    NOT_ANSWERED,
    NOT_READ,
    NOT_RECEIVED,
    BaseApplication,
    SharedState,
    headers_of,
)
from serve.http.helper_process import HelperProcess
from serve.http.request_decoder import UNSPECIFIED, content_type_of
from serve.http.responses import HttpError, Response, send_response
from serve.openai.answers import (
    EVENT_STREAM,
    CompletionFormat,
    error_in_openai_format,
    event,
    usage_of,
)
from serve.openai.generation import GenerationJob
from serve.openai.job import DecoderTexts
from serve.openai.request import ApiError
from serve.worker.http_errors import UNKNOWN_FORM, abbreviated
from serve.worker.wire import JSON

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from serve.http.options import Limits
    from serve.http.responses import Headers, Message, Receive, Send
    from serve.openai.decoder import ServedDecoder
    from serve.openai.generation import GenerationThreads, Part
    from serve.openai.job import GenerationRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODELS = "/v1/models"
TOKEN_BYTES = 768
"""Memory of a token of the longest prompt while it is read."""
STOPPING = "the server stops, before the answer was complete; ask again"


class OpenAIApplication(BaseApplication):
    """Answers requests for one decoder."""

    def __init__(
        self, decoder: ServedDecoder, threads: GenerationThreads, limits: Limits, token: str
    ) -> None:
        """Create the application; all but the two health paths require the bearer token."""
        self._decoder, self._threads = decoder, threads
        self._helper = HelperProcess(
            DecoderTexts.open,
            decoder.folder,
            decoder.name,
            what=decoder.folder,
            seconds=limits.seconds,
            needed_bytes=TOKEN_BYTES * decoder.context,
        )
        model = {
            "id": decoder.name,
            "object": "model",
            "created": decoder.created,
            "owned_by": "compress",
            "max_model_len": decoder.context,
        }
        content: dict[str, Any] = {
            MODELS: {"object": "list", "data": [model]},
            f"{MODELS}/{decoder.name}": model,
        }
        state = SharedState(decoder.name, threads, limits)
        state.metrics.add_token_counter()
        super().__init__(state, token, (COMPLETIONS, CHAT), content)

    def close(self) -> None:
        """End the threads, and the helper process."""
        super().close()
        self._helper.close()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = headers_of(scope)
        if scope["path"] not in self._model_paths:
            try:
                response = await self._get(scope, headers)
            except Exception as error:  # noqa: BLE001 - a bug must not leave the client without one
                response = self.error_response(error)
            await send_response(scope, send, response)
            return
        start, status = time.perf_counter(), CLIENT_CLOSED
        self.state.in_progress += 1
        try:
            status = await self._complete(scope, headers, receive, send)
        finally:
            self.state.in_progress -= 1
            self.state.metrics.count(status, 1, time.perf_counter() - start)

    def error_response(self, error: Exception) -> Response:
        """Return the response to an error, with OpenAI's body."""
        return error_in_openai_format(error, super().error_response(error))

    async def _complete(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> int:
        """Answer a request to the model; return the status."""
        is_chat, streams = scope["path"] == CHAT, False
        try:
            # This request is in progress already.
            self._admit(scope["method"], headers, self.state.in_progress - 1)
            deadline = self._deadline()
            request = await self._read(is_chat, headers, receive, deadline)
            job = GenerationJob(*request[:4])
            written = CompletionFormat(self._decoder, is_chat, request.with_usage)
            async with aclosing(self._threads.parts(job, self._helper)) as parts:
                part = await self._next(parts, deadline)
                if request.streams:
                    streams = True
                    await self._stream(written, job, part, parts, send)
                    return 200
                texts = [part.text]
                while not part.finish_reason:
                    part = await self._next(parts, deadline)
                    texts.append(part.text)
            usage = self._usage(job, part)
            content = written.completion("".join(texts), part.finish_reason, usage)
            response = Response(200, json.dumps(content).encode(), {"content-type": JSON})
            await send_response(scope, send, response)
        except asyncio.CancelledError:
            # Its client has gone, to which nothing is sent; or the server stops, and waits no more.
            await self._send_error(scope, send, HttpError(503, STOPPING), streams)
            raise
        except Exception as error:  # noqa: BLE001 - a bug must not leave the client without an answer
            return await self._send_error(scope, send, error, streams)
        return 200

    async def _send_error(self, scope: Message, send: Send, error: Exception, streams: bool) -> int:
        """Send an error, in a stream as its last event; return its status."""
        response = self.error_response(error)
        if streams:
            await send_events(send, event(json.loads(response.body)), more=False)
        else:
            await send_response(scope, send, response)
        return response.status

    async def _stream(
        self,
        written: CompletionFormat,
        job: GenerationJob,
        part: Part,
        parts: AsyncGenerator[Part, None],
        send: Send,
    ) -> None:
        """Send each part as an event, no faster than the client reads."""
        headers = [(name.encode(), value.encode()) for name, value in EVENT_STREAM.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_events(send, written.first_chunk())
        while True:
            if part.text:
                await send_events(send, written.text_chunk(part.text))
            if part.finish_reason:
                last = written.last_chunks(part.finish_reason, self._usage(job, part))
                await send_events(send, last, more=False)
                return
            part = await self._next(parts, self._deadline())

    async def _read(
        self, is_chat: bool, headers: Headers, receive: Receive, deadline: float
    ) -> GenerationRequest:
        """Receive a request's body, and return what it asks for."""
        state, late = self.state, NO_MEMORY
        size = state.body_size(headers)
        try:
            async with asyncio.timeout_at(deadline), state.reserved(size):
                late = NOT_RECEIVED
                content = await state.read_body(receive)
                late = NOT_READ
                found = content_type_of(headers)
                if found not in (JSON, *UNSPECIFIED) or "content-encoding" in headers:
                    message = f"found the Content-Type {abbreviated(found)}, expected {JSON}"
                    raise ApiError(UNKNOWN_FORM, f"{message}, uncompressed")
                request: GenerationRequest = await self._helper.call("read", is_chat, body=content)
                return request
        except TimeoutError:
            raise state.late_error(late) from None

    async def _next(self, parts: AsyncGenerator[Part, None], deadline: float) -> Part:
        """Return the next part of an answer; HttpError if it is not there in time."""
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(parts)
        except TimeoutError:
            raise self.state.late_error(NOT_ANSWERED) from None

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.state.limits.seconds

    def _usage(self, job: GenerationJob, last: Part) -> dict[str, int]:
        """Return the numbers of tokens of an answer, and add them to the metrics."""
        self.state.metrics.count_tokens(len(job.prompt), last.tokens)
        return usage_of(len(job.prompt), last.tokens)


async def send_events(send: Send, events: bytes, *, more: bool = True) -> None:
    """Send events of a stream; `more` follow."""
    await send({"type": "http.response.body", "body": events, "more_body": more})
