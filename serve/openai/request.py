"""Bodies of `/v1/completions` and `/v1/chat/completions`: what is read, and what is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from compress.serve.http.responses import HttpError
from compress.serve.worker.http_errors import UNREADABLE, abbreviated
from compress.serve.worker.wire import BYTE_ORDER_MARK

Values = tuple[Any, ...]

EXPECTED = {
    "prompt": "one text, or a list of token ids",
    "stop": "a text, or up to 4 of them, of 1 to 256 characters",
    "content": "a text, or a list of parts such as {type: text, text: ...}",
}
"""Of settings of several types, in messages."""

NAME_CHARACTERS = 64
"""Most characters of a client's name of a setting in a message."""

# fail_fast: an error for each of a million items would take more memory than the body.
Text = Annotated[str, Field(max_length=256, min_length=1)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Item = TypeVar("Item")
One = Annotated[list[Item], Field(min_length=1, max_length=1, fail_fast=True)]


class ApiError(HttpError):
    """An error response with the name of the setting, and OpenAI's code for it."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        """Store what the response's body says."""
        super().__init__(status, message)
        self.param, self.code = param, code


class Strict(BaseModel):
    """Settings of exactly their types; any other one is refused, and null is as good as absent."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)
    unsupported: ClassVar[dict[str, Values]] = {}
    """Settings of the interface that nothing here does, and their values that ask for nothing."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Settings that do not change an answer."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, content: Any) -> Any:
        """Refuse what is not supported by name, and leave out what asks for nothing."""
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
        return kind.model_validate_json(body.removeprefix(BYTE_ORDER_MARK))
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
