"""Bodies of `/v1/completions` and `/v1/chat/completions`, read in the helper process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, cast

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compress.artifacts.artifact import Artifact
from compress.artifacts.carried_files import TOKENIZER_CONFIG, chat_template_of
from compress.common.errors import ArtifactInvalid, first_line
from compress.export.genai.runtime import Sampling
from compress.export.genai.text import TextStream, TextTokenizer
from compress.serve.http.messages import HttpError
from compress.serve.worker.tensors import SHOWN_CHARACTERS, UNREADABLE, abbreviated
from compress.serve.worker.wire import clipped, without_mark

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

Values = tuple[Any, ...]

EXPECTED = {
    "prompt": "one text, or a list of token ids",
    "stop": "a text, or up to 4 of them, of 1 to 256 characters",
    "content": "a text, or a list of parts such as {type: text, text: ...}",
}
NAME_CHARACTERS = 64  # most characters of a client's name of a setting in a message

# fail_fast: an error for each of a million items would take more memory than the body.
Text = Annotated[str, Field(max_length=256, min_length=1)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Item = TypeVar("Item")
One = Annotated[list[Item], Field(min_length=1, max_length=1, fail_fast=True)]
COMPLETION_TOKENS = 16  # `max_tokens` of a completion where none is given, as OpenAI has it
TOO_LONG = "context_length_exceeded"
UNKNOWN_MODEL = 404
LEAST = 1e-6
"""Of `temperature` and `top_p`: float32, in which genai computes, ends not far below. Fewer than a
million tokens have one that is likelier than this `top_p`, which chooses it like 0 does."""


class ApiError(HttpError):
    """An error response with the name of the setting, and OpenAI's code for it."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


class Strict(BaseModel):
    """Settings of exactly their types; any other one is refused, and null is as good as absent."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)
    unsupported: ClassVar[dict[str, Values]] = {}
    """Settings of the interface that nothing here does, and their values that ask for nothing."""
    ignored: ClassVar[frozenset[str]] = frozenset()  # settings that do not change an answer

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        for name in cls.unsupported.keys() & content.keys():
            value = content[name]
            same = (type(value) is type(each) and value == each for each in cls.unsupported[name])
            if value is not None and not any(same):
                raise ValueError(
                    f"{name} is not supported, found {abbreviated(value)}; leave it out"
                )
        without = {*cls.unsupported, *cls.ignored}
        return {k: v for k, v in content.items() if v is not None and k not in without}


class StreamOptions(Strict):
    """What a stream ends with."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Taken and ignored: nothing is padded."""


class Body(Strict):
    """Settings that both paths take."""

    unsupported = {
        "n": (1,),
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "suffix": ("",),
        "presence_penalty": (0, 0.0),
        "frequency_penalty": (0, 0.0),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "web_search_options": (),
    }
    ignored = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),
            *("prompt_cache_key", "prompt_cache_retention"),
        }
    )
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of the answer, at most, if the body says so."""
        return self.max_tokens


class CompletionBody(Body):
    """A body of `/v1/completions`."""

    prompt: str | TokenIds | One[str] | One[TokenIds]

    @property
    def text_or_ids(self) -> str | list[int]:
        """The text, or the token ids, also where they are the only ones of a list."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            return prompt[0]
        return cast("str | list[int]", prompt)


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """A message of a chat, for the chat template."""

    unsupported = {"tool_calls": ([],), "annotations": ([],), "function_call": (), "audio": ()}
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return role and text."""
        text = self.content
        if not isinstance(text, str):
            text = "\n".join(part.text for part in text)
        return {"role": self.role, "content": text}


class ChatBody(Body):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of the answer, at most, if the body says so."""
        return self.max_completion_tokens or self.max_tokens


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], body: bytes | bytearray) -> AnyBody:
    """Return what a body asks for; ApiError that names the first setting that is wrong."""
    try:
        return kind.model_validate_json(without_mark(body))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise ApiError(UNREADABLE, f"the body is not JSON: {first['ctx']['error']}")
    # The name of an unknown setting may be as long as the body.
    where, message = [str(part)[:NAME_CHARACTERS] for part in first["loc"]], first["msg"]
    found = "" if first["type"] == "missing" else f", found {abbreviated(first['input'])}"
    if first["type"] == "value_error":  # of a validator here, whose message begins with the name
        name, _, message = str(first["ctx"]["error"]).partition(" ")
        raise ApiError(UNREADABLE, f"{'.'.join([*where, name])} {message}", next(iter(where), name))
    for place, name in enumerate(where):
        if name in EXPECTED and first["type"] != "missing":
            where, message = where[: place + 1], f"expected {EXPECTED[name]}"
            break
    raise ApiError(
        UNREADABLE, f"{'.'.join(where) or 'the body'}: {message}{found}", next(iter(where), None)
    )


class GenerationTag(Extension):
    """`{% generation %}`, which marks what training learns; the text in it stays as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """Return the statements within the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Writes messages as the text that a decoder continues."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile a template; raise ValueError if it is not valid."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(first_line(error)) from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the text up to where the answer begins; ValueError if the template refuses."""
        # None rather than undefined, as transformers passes them: templates ask `is not none`.
        absent = {"tools": None, "documents": None}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **absent, **self._special_tokens
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may fail in any way for some messages
            raise ValueError(first_line(error)) from error

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> ChatTemplate | None:
        """Return an artifact's template, or None; ArtifactInvalid for a broken one."""
        settings: dict[str, Any] = artifact.carried_json(TOKENIZER_CONFIG) or {}
        source = chat_template_of(artifact.carried_files())
        if source is None:
            return None
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in settings.items()
            if name.endswith("_token") and isinstance(value, (str, dict))
        }
        try:
            return cls(source, tokens)
        except ValueError as error:
            raise ArtifactInvalid(
                f"{artifact.path}: its chat template is not valid: {error}"
            ) from None


def _refuse(message: str) -> None:
    raise TemplateError(message)


class GenerationRequest(NamedTuple):
    """What a body asks for."""

    prompt: Sequence[int]
    most_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    streams: bool = False
    with_usage: bool = False
    """Whether the last chunk of a stream has the numbers of tokens."""


@dataclass(frozen=True)
class DecoderTexts:
    """Reads the bodies of requests to one decoder, and writes its tokens as text."""

    name: str
    context: int
    vocabulary: int
    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None

    @classmethod
    def open(cls, folder: Path, name: str) -> DecoderTexts:
        """Read tokenizer and chat template of a folder; ArtifactInvalid for broken ones."""
        artifact = Artifact.from_directory(folder)
        return cls(
            name=name,
            context=int(artifact.fact("context")),
            vocabulary=int(artifact.fact("vocabulary")),
            tokenizer=TextTokenizer(artifact),
            chat_template=ChatTemplate.from_artifact(artifact),
        )

    def read(self, is_chat: bool, content: bytes | bytearray) -> GenerationRequest:
        """Return what a decoder generates for a body; ApiError where it cannot."""
        body = parse_body(ChatBody if is_chat else CompletionBody, content)
        if isinstance(content, bytearray):
            content.clear()  # up to 8 MiB, while its text is read
        if body.model not in (None, self.name):
            message = f"model: found {abbreviated(body.model)}, expected {self.name!r}"
            raise ApiError(UNKNOWN_MODEL, message, "model", "model_not_found")
        where = "messages" if is_chat else "prompt"
        prompt, found = self._prompt_tokens(body)
        room = self.context - len(prompt)
        if not prompt or room < 1:
            message = (
                f"{where}: found {found} tokens, expected 1 to {self.context - 1}: prompt and "
                f"answer have at most {self.context} together"
            )
            raise ApiError(UNREADABLE, message, where, TOO_LONG if prompt else None)
        # Of texts, too: a tokenizer may have more tokens than the model.
        unknown = next((token for token in prompt if not 0 <= token < self.vocabulary), None)
        if unknown is not None:
            found = f"{where}: found token id {abbreviated(unknown)}"
            raise ApiError(UNREADABLE, f"{found}, expected 0 to {self.vocabulary - 1}", where)
        wanted = body.wanted_tokens
        if wanted is not None and wanted > room:
            message = (
                f"max_tokens: found {abbreviated(wanted)}, expected at most {room}: the prompt has "
                f"{len(prompt)} tokens, and prompt and answer at most {self.context} together"
            )
            raise ApiError(UNREADABLE, message, "max_tokens", TOO_LONG)
        temperature = 1.0 if body.temperature is None else body.temperature
        top_p = 1.0 if body.top_p is None else body.top_p
        return GenerationRequest(
            prompt,
            wanted or (room if is_chat else min(room, COMPLETION_TOKENS)),
            Sampling(temperature if temperature >= LEAST else 0.0, max(top_p, LEAST), body.seed),
            body.stops,
            bool(body.stream),
            bool(body.stream_options and body.stream_options.include_usage),
        )

    def decode(self, stream: TextStream, tokens: Sequence[int]) -> tuple[TextStream, list[str]]:
        """Return a stream after some more tokens, and the text that each of them adds."""
        return stream, [stream.add(token, self.tokenizer) for token in tokens]

    def decode_rest(self, stream: TextStream) -> str:
        """Return the text of tokens at the end of a stream, whole characters or not."""
        return stream.rest(self.tokenizer)

    def _prompt_tokens(self, body: Body) -> tuple[list[int], str]:
        """Return as many token ids as show whether they fit, and their number in words."""
        if isinstance(body, ChatBody):
            if self.chat_template is None:
                message = (
                    "messages: the model carries no chat template (chat_template.jinja, or "
                    "chat_template of tokenizer_config.json); ask /v1/completions"
                )
                raise ApiError(UNREADABLE, message, "messages", "no_chat_template")
            try:
                text = self.chat_template.render([each.for_template() for each in body.messages])
            except ValueError as error:
                reason = str(error)[:SHOWN_CHARACTERS]  # a template may repeat whole messages
                message = f"messages: the chat template refuses them: {reason}"
                raise ApiError(UNREADABLE, message, "messages") from error
        else:
            assert isinstance(body, CompletionBody)
            prompt = body.text_or_ids
            if isinstance(prompt, list):
                return prompt, f"{len(prompt)}"
            text = prompt

        def count_tokens(text: str) -> int:
            return len(self.tokenizer.encode(text, special_tokens=False))

        part = clipped(text, self.context, count_tokens)
        # A chat's template writes the special tokens.
        ids = self.tokenizer.encode(part, special_tokens=isinstance(body, CompletionBody))
        return ids, f"{len(ids)}" if part is text else f"more than {len(ids)}"
