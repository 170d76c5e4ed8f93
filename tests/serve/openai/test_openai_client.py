"""OpenAI's own Python client against the server, as its users write it."""

from collections.abc import Iterator
from typing import Any

import pytest

from compress.artifacts.artifact import Artifact
from export.genai.runtime import GENAI
from tests.serve.served_here import TOKEN, Served, serving

openai: Any = pytest.importorskip("openai", reason="to run these tests: pip install openai")
pytestmark = pytest.mark.skipif(
    GENAI.missing(), reason="to run these tests: pip install -e '.[genai]'"
)

MESSAGES = [{"role": "user", "content": "Hé"}]


@pytest.fixture(scope="module")
def server(folder: Artifact) -> Iterator[Served]:
    with serving(folder.path) as running:
        yield running


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
    wrong = client.with_options(api_key="wrong-token")
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_stream_that_is_left_ends(client: Any) -> None:
    for _ in range(3):
        with client.completions.create(
            model="model", prompt="a", max_tokens=90, stream=True
        ) as stream:
            next(iter(stream))
    assert client.completions.create(model="model", prompt="a", max_tokens=2).choices[0].text
