"""OpenAI's `/v1/completions` and `/v1/chat/completions` as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.serve.http import asgi_app
from compress.serve.http.asgi_app import BaseApplication, SharedState
from compress.serve.http.helper_process import HelperProcess
from compress.serve.http.messages import (
    UNSPECIFIED,
    HttpError,
    Response,
    content_type_of,
    send_response,
)
from compress.serve.openai.decoder import GenerationJob, GenerationThreads, Part, ServedDecoder
from compress.serve.openai.request import ApiError, DecoderTexts, GenerationRequest
from compress.serve.worker.tensors import UNKNOWN_FORM, abbreviated
from compress.serve.worker.wire import JSON

if TYPE_CHECKING:
    from compress.serve.http.messages import Headers, Message, Receive, Send
    from compress.serve.http.options import Limits

DONE = b"data: [DONE]\n\n"
CODES = {401: "invalid_api_key", 404: "not_found", 503: "overloaded", 504: "timeout"}
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx passes events on at once
}
COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
TOKEN_BYTES = 768  # memory of a token of the longest prompt while it is read
STOPPING = "the server stops, before the answer was complete; ask again"


@dataclass(frozen=True)
class CompletionFormat:
    """OpenAI's JSON of one completion: a whole body, or the chunks of a stream."""

    decoder: ServedDecoder
    chat: bool
    with_usage: bool
    """Whether the last chunk of a stream has the numbers of tokens."""
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: secrets.token_hex(12))

    def completion(self, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return self._object([choice], "chat.completion") | {"usage": usage}

    def chunk(self, content: Any, finish_reason: str | None = None) -> bytes:
        """Return the event of a part of the text, or in a chat of a delta."""
        key = "delta" if self.chat else "text"
        choice = {"index": 0, key: content, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.with_usage else {}
        return event(self._object([choice], "chat.completion.chunk") | usage)

    def last_chunks(self, finish_reason: str, usage: dict[str, int]) -> bytes:
        """Return the events that end a stream: finish reason, usage if wanted, `[DONE]`."""
        events = self.chunk({} if self.chat else "", finish_reason)
        if self.with_usage:
            events += event(self._object([], "chat.completion.chunk") | {"usage": usage})
        return events + DONE

    def _object(self, choices: list[dict[str, Any]], chat_object: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.decoder.name,
            "system_fingerprint": f"fp_{self.decoder.digest[:12]}",
            "choices": choices,
        }


def event(content: dict[str, Any]) -> bytes:
    """Return a server-sent event; JSON in ASCII has no line breaks."""
    return b"data: %s\n\n" % json.dumps(content, separators=(",", ":")).encode()


def error_in_openai_format(error: Exception, response: Response) -> Response:
    """Return the built-in server's response to an error, with OpenAI's body."""
    param, code = (error.param, error.code) if isinstance(error, ApiError) else (None, None)
    content = {
        "message": json.loads(response.body)["error"],
        "type": "server_error" if response.status >= 500 else "invalid_request_error",
        "param": param,
        "code": code or CODES.get(response.status),
    }
    return Response(response.status, json.dumps({"error": content}).encode(), response.headers)


class OpenAIApplication(BaseApplication):
    """Answers requests for one decoder."""

    def __init__(
        self, decoder: ServedDecoder, threads: GenerationThreads, limits: Limits, token: str
    ) -> None:
        self._decoder, self._threads = decoder, threads
        self._helper = HelperProcess(
            DecoderTexts.open,
            decoder.folder,
            decoder.name,
            what=decoder.folder,
            seconds=limits.seconds,
            needed_bytes=TOKEN_BYTES * decoder.context,
        )
        model = {"id": decoder.name, "object": "model", "created": decoder.created}
        model |= {"owned_by": "compress", "max_model_len": decoder.context}
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

    async def _ask_model(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> None:
        start, status = time.perf_counter(), asgi_app.CLIENT_CLOSED
        try:
            status = await self._complete(scope, headers, receive, send)
        finally:
            self.state.metrics.count(status, 1, time.perf_counter() - start)

    def error_response(self, error: Exception) -> Response:
        """Return the response to an error, with OpenAI's body."""
        return error_in_openai_format(error, super().error_response(error))

    async def _complete(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> int:
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
        # A chat's stream begins with the role.
        first = written.chunk({"role": "assistant", "content": ""}) if written.chat else b""
        await send_events(send, first)
        while True:
            if part.text:
                content = {"content": part.text} if written.chat else part.text
                await send_events(send, written.chunk(content))
            if part.finish_reason:
                last = written.last_chunks(part.finish_reason, self._usage(job, part))
                await send_events(send, last, more=False)
                return
            part = await self._next(parts, self._deadline())

    async def _read(
        self, is_chat: bool, headers: Headers, receive: Receive, deadline: float
    ) -> GenerationRequest:
        state, late = self.state, asgi_app.NO_MEMORY
        size = state.body_size(headers)
        try:
            async with asyncio.timeout_at(deadline), state.reserved(size):
                late = asgi_app.NOT_RECEIVED
                content = await state.read_body(receive)
                late = asgi_app.NOT_READ
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
            raise self.state.late_error(asgi_app.NOT_ANSWERED) from None

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.state.limits.seconds

    def _usage(self, job: GenerationJob, last: Part) -> dict[str, int]:
        prompt, answer = len(job.prompt), last.tokens
        self.state.metrics.count_tokens(prompt, answer)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer}
        return usage | {"total_tokens": prompt + answer}


async def send_events(send: Send, events: bytes, *, more: bool = True) -> None:
    """Send events of a stream; `more` follow."""
    await send({"type": "http.response.body", "body": events, "more_body": more})
