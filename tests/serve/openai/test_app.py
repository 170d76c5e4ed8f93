"""The ASGI application with tokens by onnxruntime alone: streams, and what ends them early."""

import asyncio
import json
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from compress.artifacts.artifact import Artifact
from export.genai.runtime import Sampling
from export.genai.session import CachedSession
from export.genai.text import TextTokenizer
from serve.http.options import Limits
from serve.openai.app import OpenAIApplication
from serve.openai.chat_template import ChatTemplate
from serve.openai.decoder import ServedDecoder
from serve.openai.generation import GenerationThreads
from tests.export.tiny_decoder import LONGEST, VOCABULARY

Message = dict[str, Any]


class SessionDecoder(ServedDecoder):
    """Generates by onnxruntime without onnxruntime-genai."""

    def generate(
        self, prompt: Sequence[int], count: int, sampling: Sampling
    ) -> Generator[int, None, None]:
        """Yield the likeliest tokens."""
        scores, cache = self._model(torch.tensor([prompt]))
        for place in range(count):
            before_token(place)
            token = scores[:, -1:].argmax(-1)
            yield int(token)
            scores, cache = self._model(token, cache)


before_token: Callable[[int], None] = int


@pytest.fixture
def decoder(folder: Artifact) -> ServedDecoder:
    return SessionDecoder(
        name="model",
        digest=folder.digest,
        context=LONGEST,
        vocabulary=VOCABULARY,
        end_tokens=frozenset({VOCABULARY - 1}),
        tokenizer=TextTokenizer(folder),
        chat_template=ChatTemplate.from_artifact(folder),
        _model=CachedSession(folder.payload_path, 1),
    )


def sent(decoder: ServedDecoder, limits: Limits, **body: Any) -> list[Message]:
    """Return what the application sends for a completion of 20 tokens."""
    messages: list[Message] = []
    content = json.dumps({"prompt": "a", "max_tokens": 20, "temperature": 0, **body}).encode()
    headers = [(b"authorization", b"Bearer t"), (b"content-length", b"%d" % len(content))]
    scope = {"method": "POST", "path": "/v1/completions", "headers": headers}

    async def receive() -> Message:
        return {"type": "http.request", "body": content}

    async def send(message: Any) -> None:
        messages.append(message)

    async def ask() -> None:
        application = OpenAIApplication(decoder, GenerationThreads(decoder, 1), limits, "t")
        await application(scope, receive, send)
        assert (application.state.in_progress, application.state.workers.depth) == (0, 0)
        application.close()

    asyncio.run(ask())
    return messages


def test_a_stream_is_framed_as_server_sent_events(decoder: ServedDecoder) -> None:
    start, *parts = sent(decoder, Limits(), stream=True)
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    *events, end = b"".join(part["body"] for part in parts).split(b"\n\n")[:-1]
    assert end == b"data: [DONE]"
    contents = [json.loads(event.removeprefix(b"data: ")) for event in events]
    text = "".join(each["choices"][0]["text"] for each in contents)
    _, whole = sent(decoder, Limits())
    assert json.loads(whole["body"])["choices"][0]["text"] == text


def fail(place: int) -> None:
    if place > 9:
        raise RuntimeError("no memory")


def stall(place: int) -> None:
    if place > 9:
        time.sleep(0.7)


@pytest.mark.parametrize(
    ("before", "seconds", "status", "words"),
    [(fail, 30, 500, "the server failed"), (stall, 0.3, 504, "did not answer within 0.3 s")],
)
def test_what_fails_midway_ends_a_stream_with_an_error(
    decoder: ServedDecoder,
    monkeypatch: pytest.MonkeyPatch,
    before: Any,
    seconds: float,
    status: int,
    words: str,
) -> None:
    monkeypatch.setitem(globals(), "before_token", before)
    start, *parts = sent(decoder, Limits(seconds=seconds), stream=True)
    assert start["status"] == 200
    error = json.loads(parts[-1]["body"].removeprefix(b"data: "))["error"]
    assert words in error["message"]
    assert error["type"] == "server_error"
    assert not parts[-1]["more_body"]
    assert b"[DONE]" not in b"".join(part["body"] for part in parts)
    start, whole = sent(decoder, Limits(seconds=seconds))
    assert start["status"] == status
    assert words in json.loads(whole["body"])["error"]["message"]


def test_without_a_chat_template_chats_are_refused(decoder: ServedDecoder) -> None:
    from dataclasses import replace

    from serve.openai.job import create_job
    from serve.openai.request import ApiError, ChatBody, parse_body

    asked = parse_body(ChatBody, b'{"messages": [{"role": "user", "content": "a"}]}')
    assert create_job(decoder, asked).count == LONGEST - len("u:a") - 1 - len("a:")
    with pytest.raises(ApiError, match=r"carries no chat template .* ask /v1/completions"):
        create_job(replace(decoder, chat_template=None), asked)
