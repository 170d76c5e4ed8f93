"""The ASGI application with tokens by onnxruntime alone: streams, and what ends them early."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from compress.artifacts.artifact import Artifact
from compress.export.genai.runtime import Sampling
from compress.export.genai.text import TextTokenizer
from compress.serve.http.asgi_app import Application
from compress.serve.http.options import Limits
from compress.serve.http.shared_state import SharedState
from compress.serve.openai.app import DecoderService, text_helper
from compress.serve.openai.decoder import GenerationJob, GenerationThreads, ServedDecoder
from compress.serve.openai.request import (
    LEAST,
    ApiError,
    ChatTemplate,
    DecoderTexts,
    GenerationRequest,
)
from tests.export.tiny_decoder import LONGEST, VOCABULARY
from tests.serve.openai import session_decoder
from tests.serve.openai.session_decoder import open_decoder
from tests.serve.served_here import application_of

Message = dict[str, Any]


@pytest.fixture
def decoder(folder: Artifact) -> ServedDecoder:
    return open_decoder(folder)


async def ask(application: Application, send: Any, **body: Any) -> None:
    """Ask for a completion of 20 tokens."""
    content = json.dumps({"prompt": "a", "max_tokens": 20, "temperature": 0, **body}).encode()
    headers = [(b"authorization", b"Bearer t"), (b"content-length", b"%d" % len(content))]
    scope = {"method": "POST", "path": "/v1/completions", "headers": headers}

    async def receive() -> Message:
        return {"type": "http.request", "body": content}

    await application(scope, receive, send)


@asynccontextmanager
async def serving(decoder: ServedDecoder, limits: Limits) -> AsyncIterator[Application]:
    """Create the application, with one thread; nothing may be left over in the end."""
    shared, threads = SharedState(limits, "t"), GenerationThreads(decoder, 1)
    service = DecoderService(decoder, threads, limits, shared, text_helper(decoder, limits))
    application = application_of(service)
    yield application
    assert (service.in_progress, threads.depth) == (0, 0)
    application.close()


def sent(decoder: ServedDecoder, limits: Limits, **body: Any) -> list[Message]:
    """Return what the application sends for a completion of 20 tokens."""
    messages: list[Message] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def answer() -> None:
        async with serving(decoder, limits) as application:
            await ask(application, send, **body)

    asyncio.run(answer())
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
    monkeypatch.setattr(session_decoder, "before_token", before)
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


def test_a_client_that_has_gone_ends_its_generation(
    decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int] = []

    def slowly(place: int) -> None:
        places.append(place)
        time.sleep(0.01)

    monkeypatch.setattr(session_decoder, "before_token", slowly)

    async def leave() -> None:
        threads = GenerationThreads(decoder, 1)
        job = GenerationJob(GenerationRequest([1], 90, Sampling(), ()))
        async with aclosing(threads.tokens(job)) as tokens:
            await anext(tokens)
        waiting = asyncio.create_task(
            anext(threads.tokens(GenerationJob(GenerationRequest([1], 90, Sampling(), ()))))
        )
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0.5)
        assert threads.depth == 0
        threads.close()

    asyncio.run(leave())
    assert len(places) < 60


def test_clients_that_have_gone_leave_the_queue(
    decoder: ServedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the only thread is busy: their prompts would fill the memory."""
    go_on = threading.Event()
    monkeypatch.setattr(session_decoder, "before_token", lambda _: go_on.wait(30))

    async def leave() -> None:
        threads = GenerationThreads(decoder, 1)
        jobs = [GenerationJob(GenerationRequest([1], 2, Sampling(), ())) for _ in range(20)]
        asking = [asyncio.create_task(anext(threads.tokens(job))) for job in jobs]
        while threads._queue.qsize() != 19:  # the thread has the first
            await asyncio.sleep(0.01)
        for each in asking[2:]:
            each.cancel()
        await asyncio.wait(asking[2:])
        assert (threads.depth, threads._queue.qsize()) == (2, 1)
        go_on.set()
        assert all([await each for each in asking[:2]])
        threads.close()

    asyncio.run(leave())


def test_a_client_that_reads_nothing_keeps_no_thread(decoder: ServedDecoder) -> None:
    async def answer() -> None:
        sent_whole = asyncio.Event()

        async def never(_: Message) -> None:
            await asyncio.Event().wait()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                sent_whole.set()

        async with serving(decoder, Limits()) as application:
            unread = [asyncio.create_task(ask(application, never, stream=True)) for _ in range(3)]
            await asyncio.wait_for(ask(application, send), 30)
            assert sent_whole.is_set()
            for _ in range(2):  # then it tries to tell its client
                for each in unread:
                    each.cancel()
                await asyncio.sleep(0)
            await asyncio.wait(unread)

    asyncio.run(answer())


@pytest.fixture
def texts(folder: Artifact) -> DecoderTexts:
    return DecoderTexts.open(folder.path, "model")


def test_tokens_that_the_model_does_not_have_are_refused(texts: DecoderTexts) -> None:
    """The tokenizer may write some, as the words that were added to it."""
    small = replace(texts, vocabulary=VOCABULARY - 1)
    for is_chat, body in (
        (False, b'{"prompt": "a<|end|>"}'),
        (False, b'{"prompt": [1, 256]}'),
        (True, b'{"messages": [{"role": "user", "content": "a"}]}'),
    ):
        assert texts.read(is_chat, body)
        with pytest.raises(ApiError, match="found token id 256, expected 0 to 255"):
            small.read(is_chat, body)


def test_what_a_chat_template_says_is_shortened(texts: DecoderTexts) -> None:
    template = ChatTemplate("{{ raise_exception('no ' + messages[0].content) }}", {})
    body = json.dumps({"messages": [{"role": "user", "content": "a" * 5000}]}).encode()
    with pytest.raises(ApiError, match="the chat template refuses them: no aaa") as raised:
        replace(texts, chat_template=template).read(True, body)
    assert len(str(raised.value)) < 300


def test_without_a_chat_template_chats_are_refused(texts: DecoderTexts) -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}]}'
    assert texts.read(True, body).most_tokens == LONGEST - len("u:a") - 1 - len("a:")
    with pytest.raises(ApiError, match=r"carries no chat template .* ask /v1/completions"):
        replace(texts, chat_template=None).read(True, body)


@pytest.mark.parametrize("value", [0, 1e-46, 1e-320, 5e-324, -0.0])
def test_the_least_numbers_choose_the_likeliest_token(texts: DecoderTexts, value: float) -> None:
    body = json.dumps({"prompt": "a", "top_p": value, "temperature": value}).encode()
    sampling = texts.read(False, body).sampling
    assert (sampling.temperature, sampling.top_p) == (0, LEAST)


def test_a_text_far_beyond_the_context_is_not_tokenized(
    texts: DecoderTexts, folder: Artifact
) -> None:
    tokenized = []

    class Counting(TextTokenizer):
        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            tokenized.append(len(text))
            return super().encode(text, special_tokens=special_tokens)

    counting = replace(texts, tokenizer=Counting(folder))
    for size in (LONGEST - 1, 400, 10**6):
        body = json.dumps({"prompt": "a " * (size // 2) + "a" * (size % 2)}).encode()
        with suppress(ApiError):
            counting.read(False, body)
    assert sum(tokenized) < 8000
    with pytest.raises(ApiError, match=r"found more than \d+ tokens, expected 1 to 95"):
        counting.read(False, body)


def test_a_body_is_held_once_while_its_text_is_read(texts: DecoderTexts, folder: Artifact) -> None:
    held = []

    class Measuring(TextTokenizer):
        def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
            held.append(len(body))
            return super().encode(text, special_tokens=special_tokens)

    body = bytearray(json.dumps({"prompt": "a " * 10**5}).encode())
    with pytest.raises(ApiError, match="found more than"):
        replace(texts, tokenizer=Measuring(folder)).read(False, body)
    assert set(held) == {0}


def test_prometheus_is_not_imported_before_several_processes_are_forked() -> None:
    # At import it reads the variable that names the folder of all processes' counters.
    code = "import sys, compress.serve.openai.decoder; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
