"""Chat templates of Hugging Face tokenizers, rendered as transformers renders them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from compress.artifacts.carried_files import TOKENIZER_CONFIG, chat_template_of
from compress.common.errors import ArtifactInvalid, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2.nodes import Node
    from jinja2.parser import Parser

    from compress.artifacts.artifact import Artifact


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
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
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


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})
