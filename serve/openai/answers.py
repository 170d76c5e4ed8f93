"""OpenAI's response format: whole completions, the chunks of a stream, and errors."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.serve.http.responses import Response
from compress.serve.openai.request import ApiError

if TYPE_CHECKING:
    from compress.serve.openai.decoder import ServedDecoder

DONE = b"data: [DONE]\n\n"
CODES = {401: "invalid_api_key", 404: "not_found", 503: "overloaded", 504: "timeout"}
EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx passes events on at once
}


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

    def first_chunk(self) -> bytes:
        """Return the event that begins a stream: the role in a chat, else nothing."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else b""

    def text_chunk(self, text: str) -> bytes:
        """Return the event of a part of the text."""
        return self._chunk({"content": text} if self.chat else text, None)

    def last_chunks(self, finish_reason: str, usage: dict[str, int]) -> bytes:
        """Return the events that end a stream: finish reason, usage if wanted, `[DONE]`."""
        events = self._chunk({} if self.chat else "", finish_reason)
        if self.with_usage:
            events += event(self._object([], "chat.completion.chunk") | {"usage": usage})
        return events + DONE

    def _chunk(self, content: Any, finish_reason: str | None) -> bytes:
        key = "delta" if self.chat else "text"
        choice = {"index": 0, key: content, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self.with_usage else {}
        return event(self._object([choice], "chat.completion.chunk") | usage)

    def _object(self, choices: list[dict[str, Any]], chat_object: str) -> dict[str, Any]:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": chat_object if self.chat else "text_completion",
            "created": self.created,
            "model": self.decoder.name,
            "system_fingerprint": f"fp_{self.decoder.digest[:12]}",
            "choices": choices,
        }


def usage_of(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Return the `usage` of a response."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
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
