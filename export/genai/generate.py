"""Continues a text with a folder of `export_genai`, for `compress generate`."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from compress.common.errors import PipelineInvalid
from compress.common.requirements import require_all
from compress.export.genai.runtime import GENAI, next_tokens, open_folder
from compress.export.genai.stage import GenaiModel
from compress.export.genai.text import TOKENIZERS, TextTokenizer

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class GeneratedText:
    """A continued text, for the terminal."""

    prompt: str
    text: str
    """What comes after the prompt."""
    token_ids: tuple[int, ...]
    """The tokens of the text."""
    first_token_ms: float
    tokens_per_second: float | None
    """Tokens after the first in a second; None where there is none."""

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the terminal."""
        rate = self.tokens_per_second
        speed = "" if rate is None else f", {rate:.3g} tokens a second after it"
        return (
            f"{self.prompt}{self.text}",
            f"{len(self.token_ids)} tokens, the first in {self.first_token_ms:.3g} ms{speed}",
        )


def continue_text(path: Path, prompt: str, tokens: int, threads: int) -> GeneratedText:
    """Return the likeliest continuation of a prompt, by onnxruntime-genai.

    Raises:
        ArtifactInvalid: it is no folder of `export_genai`, was altered, or has no tokenizer.
        PipelineInvalid: the prompt is empty, or fills the context.
        Unavailable: onnxruntime-genai or tokenizers is not installed.
    """
    artifact = GenaiModel.from_directory(path)
    require_all([GENAI, TOKENIZERS], str(path))
    artifact.verify()
    tokenizer = TextTokenizer(artifact)
    model = open_folder(path, threads)
    ids = tokenizer.encode(prompt)
    room = int(artifact.fact("context")) - len(ids)
    if not ids or room < 1:
        raise PipelineInvalid(
            f"the prompt has {len(ids)} tokens, expected 1 to {len(ids) + room - 1}: a text of "
            f"{artifact.path} has at most {artifact.fact('context')}"
        )
    times, found = [perf_counter()], list[int]()
    for token in next_tokens(model, ids, min(tokens, room)):
        times.append(perf_counter())
        found.append(token)
    spent = times[-1] - times[1]
    return GeneratedText(
        prompt=prompt,
        text=tokenizer.decode(found),
        token_ids=tuple(found),
        first_token_ms=1000 * (times[1] - times[0]),
        tokens_per_second=(len(found) - 1) / spent if len(found) > 1 else None,
    )
