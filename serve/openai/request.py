"""Bodies of `/v1/completions` and `/v1/chat/completions`: what is read, and what is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve.http.responses import HttpError
from serve.worker.http_errors import UNREADABLE, abbreviated

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (),
    "suffix": ("",),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
}
"""Settings of the interface that nothing here does, and their values that ask for nothing."""
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "verbosity"),
    }
)
"""Settings that do not change an answer."""

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


class ApiError(HttpError):
    """An error response with the name of the setting, and OpenAI's code for it."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        """Store what the response's body says."""
        super().__init__(status, message)
        self.param, self.code = param, code


class Strict(BaseModel):
    """Settings of exactly their types; any other one is refused."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    """What a stream ends with."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Taken and ignored: nothing is padded."""


class Body(Strict):
    """Settings that both paths take."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=4, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, content: Any) -> Any:
        """Refuse what is not supported by name, and leave out what asks for nothing."""
        if not isinstance(content, dict):
            return content
        for name, harmless in NOT_SUPPORTED.items():
            value = content.get(name)
            same = (type(value) is type(each) and value == each for each in harmless)
            if value is not None and not any(same):
                raise ValueError(
                    f"{name} is not supported, found {abbreviated(value)}; leave it out"
                )
        known = {*NOT_SUPPORTED, *IGNORED}
        return {name: value for name, value in content.items() if name not in known}

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

    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1, max_length=1, fail_fast=True)]


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """A message of a chat, for the chat template."""

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


def parse_body(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Return what a body asks for; ApiError that names the first setting that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        raise ApiError(UNREADABLE, f"the body is not JSON: {first['ctx']['error']}")
    message = first["msg"]
    if first["type"] == "value_error":  # of a validator here, whose message begins with the name
        message = str(first["ctx"]["error"])
        raise ApiError(UNREADABLE, message, message.partition(" ")[0])
    # The name of an unknown setting may be as long as the body.
    where = [str(part)[:NAME_CHARACTERS] for part in first["loc"]]
    for place, name in enumerate(where):
        if name in EXPECTED and first["type"] != "missing":
            where, message = where[: place + 1], f"expected {EXPECTED[name]}"
            break
    found = "" if first["type"] == "missing" else f", found {abbreviated(first['input'])}"
    raise ApiError(
        UNREADABLE, f"{'.'.join(where) or 'the body'}: {message}{found}", next(iter(where), None)
    )
