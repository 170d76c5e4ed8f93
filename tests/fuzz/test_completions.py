"""Any body of OpenAI's interface becomes a job that can be generated, or is refused with 4xx."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.openai.answers import error_in_openai_format
from serve.openai.chat_template import ChatTemplate
from serve.openai.decoder import ServedDecoder
from serve.openai.job import create_job
from serve.openai.request import ApiError, ChatBody, CompletionBody, parse_body
from tests.export.tiny_decoder import LONGEST, VOCABULARY, decoder
from tests.fuzz.mutations import changed_bytes, changed_value

SETTINGS = {
    "model": "model",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 3,
    "stop": ["x", "yz"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "user": "u",
}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
MESSAGES = [{"role": "user", "content": "hi", "name": "n"}, {"role": "assistant", "content": PARTS}]
RIGHT = (
    (CompletionBody, {**SETTINGS, "prompt": "a"}),
    (CompletionBody, {**SETTINGS, "prompt": [1, 2]}),
    (CompletionBody, {**SETTINGS, "prompt": ["a"]}),
    (ChatBody, {**SETTINGS, "messages": MESSAGES, "max_completion_tokens": 4}),
)
WORDS = (*SETTINGS, "prompt", "messages", "role", "content", "type", "text", "echo", "tools")
ODD = (
    b"\\ud800",
    b"1e400",
    b"9" * 4300,
    b"9" * 4301,
    b"[" * 300,
    b"NaN",
    b"\\u0000",
    b"\xff",
    b",",
)
TEMPLATE = "{% for m in messages %}{{ m.role + m.content | trim + eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedDecoder:
    from export.genai.text import TextTokenizer

    source = decoder(tmp_path_factory.mktemp("decoder"), chat_template=TEMPLATE)
    return ServedDecoder(
        name="model",
        digest=source.digest,
        context=LONGEST,
        vocabulary=VOCABULARY,
        end_tokens=frozenset(),
        tokenizer=TextTokenizer(source),
        chat_template=ChatTemplate.from_artifact(source),
        _model=None,
    )


@st.composite
def bodies(draw: st.DrawFn) -> tuple[type[Any], bytes]:
    """Return a body; most are almost right."""
    kind, content = draw(st.sampled_from(RIGHT))
    value = draw(st.one_of(st.just(content), changed_value(content, WORDS)))
    body = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return kind, draw(changed_bytes(body, ODD)) if draw(st.booleans()) else body


@pytest.mark.timeout(600)
@given(request=bodies())
def test_any_body_can_be_generated_or_is_refused_with_4xx(
    served: ServedDecoder, request: tuple[type[Any], bytes]
) -> None:
    kind, content = request
    try:
        body = parse_body(kind, content)
        job = create_job(served, body)
    except ApiError as error:
        response = error_in_openai_format(error, error.response)
        shown = json.loads(response.body)["error"]
        assert 400 <= response.status < 500
        assert [*shown] == ["message", "type", "param", "code"]
        assert 0 < len(shown["message"]) < 1000
        return
    assert 0 < len(job.prompt) < len(job.prompt) + job.count <= LONGEST
    assert all(0 <= token < VOCABULARY for token in job.prompt)
    assert 0 <= job.sampling.temperature <= 2
    assert 0 < job.sampling.top_p <= 1
    assert all(job.stops) and len(job.stops) <= 4
    assert type(body.stream) in (bool, type(None))


def test_the_bodies_that_are_changed_are_right(served: ServedDecoder) -> None:
    for kind, content in RIGHT:
        assert create_job(served, parse_body(kind, json.dumps(content).encode())).count in (4, 5)
