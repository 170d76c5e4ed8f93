"""Bodies of OpenAI's interface, the texts that end an answer, and the form of what is sent."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compress.serve.http.messages import HttpError
from compress.serve.openai.app import error_in_openai_format
from compress.serve.openai.decoder import StopTexts
from compress.serve.openai.request import ApiError, ChatBody, CompletionBody, parse_body
from compress.serve.worker.tensors import UNREADABLE

USER = {"role": "user", "content": "hi"}


def test_what_asks_for_nothing_is_taken() -> None:
    asked = parse_body(
        CompletionBody,
        json.dumps(
            {
                **{
                    "model": "model",
                    "prompt": "a",
                    "max_tokens": 5,
                    "temperature": 1,
                    "top_p": 0.5,
                },
                **{"seed": 2**70, "stop": ["x", "y"], "stream": True, "n": 1, "best_of": 1},
                **{"echo": False, "logprobs": None, "suffix": "", "presence_penalty": 0.0},
                **{"logit_bias": {}, "user": "u", "stream_options": {"include_usage": True}},
            }
        ).encode(),
    )
    assert (asked.prompt, asked.wanted_tokens, asked.temperature) == ("a", 5, 1)
    assert (asked.top_p, asked.seed, asked.stops, asked.stream) == (0.5, 2**70, ("x", "y"), True)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = parse_body(
        ChatBody,
        json.dumps(
            {
                "messages": [USER, {"role": "user", "content": parts}],
                "max_completion_tokens": 7,
                "stop": "s",
                "tools": [],
                "response_format": {"type": "text"},
                "logprobs": False,
            }
        ).encode(),
    )
    assert [m.for_template()["content"] for m in chat.messages] == ["hi", "a\nb"]
    assert (chat.wanted_tokens, chat.stops) == (7, ("s",))


def test_null_is_as_good_as_absent() -> None:
    names = [name for name in ChatBody.model_fields if name != "messages"]
    nulls = dict.fromkeys([*names, *ChatBody.unsupported, *ChatBody.ignored])
    answer = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "x": None}
    messages = [USER, {**answer, "annotations": []}]
    options = {"stream_options": {"include_usage": None}}
    chat = parse_body(ChatBody, json.dumps({**nulls, "messages": messages, **options}).encode())
    assert [message.for_template()["content"] for message in chat.messages] == ["hi", "a"]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]]])
def test_a_list_of_one_prompt_is_that_prompt(prompt: Any) -> None:
    body = json.dumps({"prompt": prompt, "tool_choice": "auto", "top_logprobs": 0}).encode()
    expected = "a" if prompt in ("a", ["a"]) else [1, 2]
    assert parse_body(CompletionBody, b"\xef\xbb\xbf" + body).text_or_ids == expected


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ({}, "prompt", "prompt: Field required"),
        ({"prompt": 5}, "prompt", "prompt: expected one text, or a list of token ids, found 5"),
        ({"prompt": ["a", "b"]}, "prompt", "prompt: expected one text, or a list of token ids"),
        ({"prompt": [1.5]}, "prompt", "prompt: expected one text, or a list of token ids"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater than or equal to 1, found 0"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer, found True"),
        ({"prompt": "a", "temperature": 2.1}, "temperature", "less than or equal to 2, found 2.1"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature", "found nan"),
        ({"prompt": "a", "top_p": -0.1}, "top_p", "greater than or equal to 0, found -0.1"),
        ({"prompt": "a", "seed": "1"}, "seed", "seed: Input should be a valid integer"),
        ({"prompt": "a", "stop": ""}, "stop", "stop: expected a text, or up to 4 of them, of 1 to"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop", "stop: expected a text, or up to 4"),
        ({"prompt": "a", "stop": "x" * 257}, "stop", "stop: expected a text, or up to 4"),
        ({"prompt": "a", "stream": "yes"}, "stream", "stream: Input should be a valid boolean"),
        ({"prompt": "a", "n": 2}, "n", "n is not supported, found 2; leave it out"),
        ({"prompt": "a", "n": True}, "n", "n is not supported, found True"),
        ({"prompt": "a", "echo": True}, "echo", "echo is not supported"),
        ({"prompt": "a", "logprobs": 0}, "logprobs", "logprobs is not supported, found 0"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias", "logit_bias is not supported"),
        ({"prompt": "a", "max_token": 1}, "max_token", "max_token: Extra inputs are not permitted"),
        ([], None, "the body: Input should be"),
    ],
)
def test_a_mistake_is_named(content: Any, param: str | None, words: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_body(CompletionBody, json.dumps(content).encode())
    assert words in str(raised.value)
    assert (raised.value.response.status, raised.value.param) == (UNREADABLE, param)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: List should have at least 1 item"),
        ([{"role": "user"}], "messages.0.content: Field required"),
        ([{**USER, "content": 5}], "messages.0.content: expected a text, or a list of parts"),
        ([{**USER, "content": [{"type": "image_url"}]}], "messages.0.content: expected a text, or"),
        ([USER, {**USER, "role": ""}], "messages.1.role: String should have at least 1"),
        ([{**USER, "tool_calls": [{}]}], "messages.0.tool_calls is not supported, found [{}]"),
        ([USER, {**USER, "refusal": "no"}], "messages.1.refusal: Extra inputs are not permitted"),
    ],
)
def test_a_mistake_in_a_message_is_named(messages: Any, words: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_body(ChatBody, json.dumps({"messages": messages}).encode())
    assert words in str(raised.value)
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "a"} x']
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is not JSON"):
        parse_body(CompletionBody, body)


def test_errors_have_the_fields_of_openai() -> None:
    error: HttpError = ApiError(404, "model: not here", "model", "model_not_found")
    written = error_in_openai_format(error, error.response)
    expected = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert json.loads(written.body) == {"error": {"message": "model: not here", **expected}}
    error = HttpError(503, "8 requests wait", retry_after="1")
    written = error_in_openai_format(error, error.response)
    expected = {"type": "server_error", "param": None, "code": "overloaded"}
    assert json.loads(written.body) == {"error": {"message": "8 requests wait", **expected}}
    assert (written.status, written.headers["retry-after"]) == (503, "1")


TEXT = st.text(alphabet="ab", max_size=30)


@example(["a", "b"], ["ab"])
@given(st.lists(TEXT), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4))
def test_a_text_ends_before_the_first_stop(parts: list[str], stops: list[str]) -> None:
    finder, whole, written = StopTexts(stops), "".join(parts), ""
    for part in parts:
        written += finder.add(part)
        if finder.found:
            break
    written += finder.rest()
    if not any(stop in whole for stop in stops):
        assert (written, finder.found) == (whole, False)
        return
    # The first in the text that had come: another may begin before it and end after it.
    assert finder.found
    assert whole.startswith(written)
    assert any(whole.startswith(written + stop) for stop in stops)
    assert not any(stop in written for stop in stops)


def test_a_text_is_held_back_no_longer_than_it_may_be_a_stop() -> None:
    finder = StopTexts(["END"])
    assert [finder.add(part) for part in ("one E", "N", "d E", "x")] == ["one ", "", "ENd ", "Ex"]
