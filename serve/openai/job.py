"""Turns a request's body into what is generated: prompt tokens, number of tokens, sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from export.genai.runtime import Sampling
from serve.openai.generation import GenerationJob
from serve.openai.request import ApiError, ChatBody, CompletionBody
from serve.worker.http_errors import SHOWN_CHARACTERS, UNREADABLE, abbreviated

if TYPE_CHECKING:
    from serve.openai.decoder import ServedDecoder
    from serve.openai.request import Body

COMPLETION_TOKENS = 16
"""`max_tokens` of a completion where none is given, as OpenAI has it."""
TOO_LONG = "context_length_exceeded"
UNKNOWN_MODEL = 404


def create_job(decoder: ServedDecoder, body: Body) -> GenerationJob:
    """Return what a decoder generates for a body; ApiError where it cannot."""
    if body.model not in (None, decoder.name):
        message = f"model: found {abbreviated(body.model)}, expected {decoder.name!r}"
        raise ApiError(UNKNOWN_MODEL, message, "model", "model_not_found")
    is_chat = isinstance(body, ChatBody)
    where = "messages" if is_chat else "prompt"
    prompt = prompt_tokens(decoder, body)
    room = decoder.context - len(prompt)
    if not prompt or room < 1:
        message = (
            f"{where}: found {len(prompt)} tokens, expected 1 to {decoder.context - 1}: prompt and "
            f"answer have at most {decoder.context} together"
        )
        raise ApiError(UNREADABLE, message, where, TOO_LONG if prompt else None)
    # Of texts, too: a tokenizer may have more tokens than the model.
    unknown = next((token for token in prompt if not 0 <= token < decoder.vocabulary), None)
    if unknown is not None:
        message = (
            f"{where}: found token id {abbreviated(unknown)}, expected 0 to "
            f"{decoder.vocabulary - 1}"
        )
        raise ApiError(UNREADABLE, message, where)
    wanted = body.wanted_tokens
    if wanted is not None and wanted > room:
        message = (
            f"max_tokens: found {abbreviated(wanted)}, expected at most {room}: the prompt has "
            f"{len(prompt)} tokens, and prompt and answer at most {decoder.context} together"
        )
        raise ApiError(UNREADABLE, message, "max_tokens", TOO_LONG)
    count = wanted or (room if is_chat else min(room, COMPLETION_TOKENS))
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    return GenerationJob(prompt, count, Sampling(temperature, top_p, body.seed), body.stops)


def prompt_tokens(decoder: ServedDecoder, body: Body) -> list[int]:
    """Return the token ids of a prompt or a chat."""
    if isinstance(body, ChatBody):
        if decoder.chat_template is None:
            message = (
                "messages: the model carries no chat template (chat_template.jinja, or "
                "chat_template of tokenizer_config.json); ask /v1/completions"
            )
            raise ApiError(UNREADABLE, message, "messages", "no_chat_template")
        try:
            text = decoder.chat_template.render([each.for_template() for each in body.messages])
        except ValueError as error:
            reason = str(error)[:SHOWN_CHARACTERS]  # a template may repeat whole messages
            message = f"messages: the chat template refuses them: {reason}"
            raise ApiError(UNREADABLE, message, "messages") from error
        # The template writes the special tokens.
        return decoder.tokenizer.encode(text, special_tokens=False)
    assert isinstance(body, CompletionBody)
    prompt = body.prompt
    if isinstance(prompt, str):
        return decoder.tokenizer.encode(prompt)
    if prompt and isinstance(prompt[0], str):
        return decoder.tokenizer.encode(prompt[0])
    return [each for each in prompt if isinstance(each, int)]
