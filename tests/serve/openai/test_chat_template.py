"""Chat templates give the text that transformers gives; a stream's parts are the whole text."""

import random

import pytest

from compress.artifacts.artifact import Artifact
from export.genai.text import TextStream, TextTokenizer
from serve.openai.request import ChatTemplate

MESSAGES = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "What is 1 < 2 & 'é' 🙂?\0"},
    {"role": "assistant", "content": "True"},
    {"role": "user", "content": "<|end|>"},
]


def test_the_text_is_that_of_transformers(folder: Artifact) -> None:
    from transformers import AutoTokenizer

    template = ChatTemplate.from_artifact(folder)
    assert template is not None
    theirs = AutoTokenizer.from_pretrained(folder.path)
    text = template.render(MESSAGES)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == expected
    assert text.endswith("<|end|>a:")
    ids = TextTokenizer(folder).encode(text, special_tokens=False)
    assert ids == theirs(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{{ m.content }}\n{% endfor %}",
        "{{ messages | tojson }}{{ bos_token }}",
        "{% generation %}x{% endgeneration %}",
        "{% if tools is not none %}{{ tools | tojson }}{% endif %}{{ documents is none }}",
    ],
)
def test_other_templates_too(folder: Artifact, source: str) -> None:
    from transformers import AutoTokenizer

    tokens = {"eos_token": "<|end|>", "bos_token": "<s>"}
    theirs = AutoTokenizer.from_pretrained(folder.path, **tokens)
    expected = theirs.apply_chat_template(
        MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(source, tokens).render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_says_why(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_broken_template_is_found_before_serving() -> None:
    with pytest.raises(ValueError, match="Expected an expression"):
        ChatTemplate("{% if %}", {})


def test_the_parts_of_a_stream_are_the_text(folder: Artifact) -> None:
    tokenizer, drawn = TextTokenizer(folder), random.Random(0)
    texts = ["a\0b 🙂🙂 é中 <|end|> x", "".join(map(chr, range(32, 3000, 7)))]
    # Drawn bytes are rarely UTF-8.
    all_ids = [tokenizer.encode(text) for text in texts]
    all_ids += [[drawn.randrange(257) for _ in range(60)] for _ in range(100)]
    for ids in all_ids:
        stream = TextStream()
        parts = [stream.add(token, tokenizer) for token in ids]
        assert "".join([*parts, stream.rest(tokenizer)]) == tokenizer.decode(ids)
    stream = TextStream()
    parts = [stream.add(token, tokenizer) for token in tokenizer.encode("a🙂b")]
    assert parts == ["a", "", "", "", "🙂", "b"]
