"""Any body of OpenAI's interface becomes a job that can be generated, or is refused with 4xx."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.openai.app import error_in_openai_format
from serve.openai.request import ApiError, ChatTemplate, DecoderTexts
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
    (False, {**SETTINGS, "prompt": "a"}),
    (False, {**SETTINGS, "prompt": [1, 2]}),
    (False, {**SETTINGS, "prompt": ["a"]}),
    (True, {**SETTINGS, "messages": MESSAGES, "max_completion_tokens": 4}),
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
def served(tmp_path_factory: pytest.TempPathFactory) -> DecoderTexts:
    from export.genai.text import TextTokenizer

    source = decoder(tmp_path_factory.mktemp("decoder"), chat_template=TEMPLATE)
    return DecoderTexts(
        name="model",
        context=LONGEST,
        vocabulary=VOCABULARY,
        tokenizer=TextTokenizer(source),
        chat_template=ChatTemplate.from_artifact(source),
    )


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bool, bytes]:
    """Return a body; most are almost right."""
    is_chat, content = draw(st.sampled_from(RIGHT))
    value = draw(st.one_of(st.just(content), changed_value(content, WORDS)))
    body = json.dumps(value, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return is_chat, draw(changed_bytes(body, ODD)) if draw(st.booleans()) else body


@pytest.mark.timeout(600)
@given(request=bodies())
def test_any_body_can_be_generated_or_is_refused_with_4xx(
    served: DecoderTexts, request: tuple[bool, bytes]
) -> None:
    try:
        job = served.read(*request)
    except ApiError as error:
        response = error_in_openai_format(error, error.response)
        shown = json.loads(response.body)["error"]
        assert 400 <= response.status < 500
        assert [*shown] == ["message", "type", "param", "code"]
        assert 0 < len(shown["message"]) < 1000
        return
    assert 0 < len(job.prompt) < len(job.prompt) + job.most_tokens <= LONGEST
    assert all(0 <= token < VOCABULARY for token in job.prompt)
    assert 0 <= job.sampling.temperature <= 2
    assert 0 < job.sampling.top_p <= 1
    assert all(job.stops) and len(job.stops) <= 4


def test_the_bodies_that_are_changed_are_right(served: DecoderTexts) -> None:
    for is_chat, content in RIGHT:
        assert served.read(is_chat, json.dumps(content).encode()).most_tokens in (4, 5)
