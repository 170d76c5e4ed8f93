"""OpenAI's `/v1/completions` and `/v1/chat/completions` as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.serve.http import messages, shared_state
from compress.serve.http.helper_process import HelperProcess
from compress.serve.http.messages import (
    UNSPECIFIED,
    HttpError,
    Response,
    content_type_of,
    send_response,
)
from compress.serve.http.shared_state import Served, SharedState
from compress.serve.openai import decoder as decoders
from compress.serve.openai.decoder import GenerationJob, GenerationThreads, Part, ServedDecoder
from compress.serve.openai.request import ApiError, DecoderTexts, GenerationRequest
from compress.serve.worker.tensors import UNKNOWN_FORM, abbreviated
from compress.serve.worker.wire import JSON

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.serve.http.messages import Headers, Message, Receive, Send
    from compress.serve.http.options import Limits, Options
    from compress.serve.worker.tensors import Named

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


def load_decoder(
    artifact: Artifact, name: str, version: str, options: Options, shared: SharedState
) -> Callable[[], DecoderService]:
    """Load a decoder, in a thread; return what starts to answer requests, in the event loop."""
    decoder = decoders.open_decoder(artifact, name, options.threads or 1)
    body_bytes = min(options.limits.body_bytes, decoder.longest_body)
    limits = replace(options.limits, body_bytes=body_bytes)
    helper = text_helper(decoder, limits)

    def start() -> DecoderService:
        threads = GenerationThreads(decoder, options.width)
        return DecoderService(decoder, threads, limits, shared, helper, version)

    return start


def text_helper(decoder: ServedDecoder, limits: Limits) -> HelperProcess:
    """Start the process that reads the requests to a decoder and writes its texts."""
    return HelperProcess(
        DecoderTexts.open,
        decoder.folder,
        decoder.name,
        what=decoder.folder,
        seconds=limits.seconds,
        needed_bytes=TOKEN_BYTES * decoder.context,
    )


class DecoderService(Served):
    """Answers requests for one decoder."""

    prefix = "/v1/"

    def __init__(
        self,
        decoder: ServedDecoder,
        threads: GenerationThreads,
        limits: Limits,
        shared: SharedState,
        helper: HelperProcess,
        version: str = "1",
    ) -> None:
        super().__init__(decoder.name, version, threads, limits, shared)
        self._decoder, self._threads, self._helper = decoder, threads, helper
        self.resources.callback(helper.close)

    @staticmethod
    def error_response(error: Exception) -> Response:
        """Return the response to an error, with OpenAI's body."""
        return error_in_openai_format(error, messages.error_response(error))

    def addresses(self, *, of_version: bool) -> list[str]:
        """Return OpenAI's paths, which name no version."""
        return [] if of_version else [COMPLETIONS, CHAT]

    def pages(self, versions: list[str], *, of_version: bool) -> dict[str, Named]:
        """Return OpenAI's list of models, of this one alone."""
        model = {"id": self.name, "object": "model", "created": self._decoder.created}
        model |= {"owned_by": "compress", "max_model_len": self._decoder.context}
        listed: Named = {"object": "list", "data": [model]}
        return {} if of_version else {MODELS: listed, f"{MODELS}/{self.name}": model}

    async def answer(self, scope: Message, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer a request for a completion."""
        start, status = time.perf_counter(), shared_state.CLIENT_CLOSED
        try:
            status = await self._complete(scope, headers, receive, send)
        finally:
            self.record(headers, status, 1, start)

    async def _complete(
        self, scope: Message, headers: Headers, receive: Receive, send: Send
    ) -> int:
        is_chat, streams = scope["path"] == CHAT, False
        try:
            # This request is in progress already.
            self.admit(scope["method"], headers, self.in_progress - 1)
            deadline = self._deadline()
            request = await self._read(is_chat, headers, receive, deadline)
            job = GenerationJob(request)
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
        late, limit = shared_state.NO_MEMORY, self.limits.body_bytes
        size = shared_state.body_size(headers, limit)
        try:
            async with asyncio.timeout_at(deadline), self.shared.reserved(size):
                late = shared_state.NOT_RECEIVED
                content = await shared_state.read_body(receive, limit)
                late = shared_state.NOT_READ
                found = content_type_of(headers)
                if found not in (JSON, *UNSPECIFIED) or "content-encoding" in headers:
                    message = f"found the Content-Type {abbreviated(found)}, expected {JSON}"
                    raise ApiError(UNKNOWN_FORM, f"{message}, uncompressed")
                request: GenerationRequest = await self._helper.call("read", is_chat, body=content)
                return request
        except TimeoutError:
            raise self.late_error(late) from None

    async def _next(self, parts: AsyncGenerator[Part, None], deadline: float) -> Part:
        """Return the next part of an answer; HttpError if it is not there in time."""
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(parts)
        except TimeoutError:
            raise self.late_error(shared_state.NOT_ANSWERED) from None

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.limits.seconds

    def _usage(self, job: GenerationJob, last: Part) -> dict[str, int]:
        prompt, answer = len(job.request.prompt), last.tokens
        for part, count in (("prompt", prompt), ("answer", answer)):
            self.shared.metrics.tokens.labels(self.name, self.version, part).inc(count)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer}
        return usage | {"total_tokens": prompt + answer}


async def send_events(send: Send, events: bytes, *, more: bool = True) -> None:
    """Send events of a stream; `more` follow."""
    await send({"type": "http.response.body", "body": events, "more_body": more})
