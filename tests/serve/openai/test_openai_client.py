"""OpenAI's own Python client against the server, as its users write it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from compress.artifacts.artifact import Artifact
from tests.serve.openai.asking import half_sent
from tests.serve.openai.session_decoder import serving_by_session
from tests.serve.served_here import TOKEN, Served

openai: Any = pytest.importorskip("openai", reason="to run these tests: pip install openai")

MESSAGES = [{"role": "user", "content": "Hé"}]


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


def test_completions_whole_and_streamed(client: Any) -> None:
    asked = {"model": "model", "prompt": "The ", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    usage = {"include_usage": True}
    parts = [*client.completions.create(**asked, stream=True, stream_options=usage)]
    text = "".join(part.choices[0].text for part in parts if part.choices)
    assert text == whole.choices[0].text
    assert parts[-1].usage == whole.usage


def test_chats_whole_and_streamed(client: Any) -> None:
    asked = {"model": "model", "messages": MESSAGES, "max_completion_tokens": 20, "seed": 3}
    whole = client.chat.completions.create(**asked)
    message = whole.choices[0].message
    assert message.role == "assistant"
    parts = [*client.chat.completions.create(**asked, stream=True)]
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("form", ["as it is", "dict", "JSON"])
def test_an_answer_is_sent_back_in_the_next_turn(client: Any, form: str) -> None:
    asked = {"model": "model", "max_tokens": 4}
    answer = client.chat.completions.create(**asked, messages=MESSAGES).choices[0].message
    before = {"dict": answer.model_dump(), "JSON": answer.to_dict()}.get(form, answer)
    again = [*MESSAGES, before, {"role": "user", "content": "more"}]
    assert client.chat.completions.create(**asked, messages=again).choices[0].message.role


def test_what_asks_for_nothing_is_taken(client: Any) -> None:
    nothing: dict[str, Any] = {
        **{"n": 1, "stop": [], "seed": 0, "temperature": 0, "top_p": 0, "logprobs": False},
        **{"top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0},
        **{"user": "u", "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        **{"parallel_tool_calls": True, "metadata": {}, "store": False, "service_tier": "auto"},
        **{"modalities": ["text"], "reasoning_effort": "none", "verbosity": "low"},
    }
    asked = {"model": "model", "messages": MESSAGES, "max_tokens": 2}
    for settings in (nothing, dict.fromkeys(nothing)):
        assert client.chat.completions.create(**asked, **settings).choices[0].finish_reason
    for prompt in ("a", ["a"], [1, 2], [[1, 2]]):
        few = {"model": "model", "max_tokens": 2, "best_of": 1, "echo": False, "suffix": None}
        assert client.completions.create(prompt=prompt, **few).choices[0].finish_reason


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.models.retrieve("model").owned_by == "compress"


def test_errors_have_the_clients_types(client: Any, server: Served) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="model", prompt="a", n=2)
    assert (raised.value.param, raised.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="model", prompt="a" * 500)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as raised:
        client.completions.create(model="model", prompt="a" * 2**20, stream=True)
    assert raised.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        client.completions.create(model="model", prompt="a", stream=True, stream_options={"x": 1})
    wrong = client.with_options(api_key="wrong-token")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_full_queue_is_tried_again(client: Any, server: Served) -> None:
    asked = {"model": "model", "prompt": "a", "max_tokens": 2}
    with ExitStack() as others:
        for _ in range(8):  # of conftest.py
            others.enter_context(half_sent(server, prompt="a"))
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(**asked)
        assert (raised.value.status_code, raised.value.code) == (503, "overloaded")
        leaving = threading.Timer(0.2, others.close)
        leaving.start()
        # It waits for the second of Retry-After.
        assert client.with_options(max_retries=2).completions.create(**asked).choices[0].text
        leaving.join()


def test_a_stream_that_a_stopping_server_ends_raises(folder: Artifact) -> None:
    with (
        serving_by_session(folder, token_seconds=0.1, stop_seconds=1) as slow,
        openai.OpenAI(base_url=f"{slow.url}/v1", api_key=TOKEN, max_retries=0) as client,
    ):
        parts = client.completions.create(
            model="model", prompt="hello", max_tokens=91, temperature=0, stream=True
        )
        assert next(parts).choices[0].text
        slow.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server stops") as raised:
            list(parts)
        assert raised.value.code == "overloaded"
        assert slow.process.wait(120) == 143


def test_a_stream_that_is_left_ends(client: Any) -> None:
    for _ in range(3):
        with client.completions.create(
            model="model", prompt="a", max_tokens=90, stream=True
        ) as stream:
            next(iter(stream))
    assert client.completions.create(model="model", prompt="a", max_tokens=2).choices[0].text
