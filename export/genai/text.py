"""Texts and token ids of a folder of `export_genai`, by the `tokenizer.json` that it carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from compress.artifacts.carried_files import TOKENIZER
from compress.common.errors import ArtifactInvalid, PipelineInvalid, raised_as
from compress.common.requirements import Requirement, pip_install, require_all
from compress.export.genai.runtime import GENAI, next_tokens, open_folder
from compress.export.genai.stage import GenaiModel

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact


@dataclass(frozen=True)
class GeneratedText:
    """A continued text, for the terminal."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
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

    Raise ArtifactInvalid where the folder is none of `export_genai` or was altered, PipelineInvalid
    where the prompt is empty or fills the context, Unavailable where a library is missing.
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


TOKENIZERS = Requirement(what="tokenizers", install=pip_install("genai"))
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the bytes of half a character are decoded to


class TextTokenizer:
    """Splits texts as the model was trained, with the package `tokenizers`.

    onnxruntime-genai's own tokenizer ends a text at a zero byte, and loses characters after bytes
    that are no UTF-8 (0.18).
    """

    def __init__(self, artifact: Artifact) -> None:
        """Read the tokenizer; raise ArtifactInvalid where there is none."""
        from tokenizers import Tokenizer

        content = artifact.carried_files().get(TOKENIZER)
        if content is None:
            raise ArtifactInvalid(
                f"{artifact.path}: has no {TOKENIZER}, so it takes token ids alone; export the "
                "model from a Hugging Face folder that has one"
            )
        what = f"{artifact.path / TOKENIZER}: tokenizers cannot read it"
        with raised_as(ArtifactInvalid, what):
            self._tokenizer = Tokenizer.from_str(content.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return token ids; with the tokens that the tokenizer puts around a text, if wanted."""
        # Without offsets: it takes half the memory.
        encode = self._tokenizer.encode_batch_fast
        ids: list[int] = encode([text], add_special_tokens=special_tokens)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(ids)
        return text


class TextStream:
    """Decodes tokens one by one; the parts together are the text of all."""

    def __init__(self) -> None:
        # Decoded together with the tokens before: some tokenizers write a space between two.
        self._before: list[int] = []
        self._unwritten: list[int] = []

    def add(self, token: int, tokenizer: TextTokenizer) -> str:
        """Return what a token adds to the text; nothing while a character is incomplete."""
        self._unwritten.append(token)
        part = self.rest(tokenizer)
        if not part or part.endswith(INCOMPLETE):
            return ""
        self._before, self._unwritten = self._unwritten, []
        return part

    def rest(self, tokenizer: TextTokenizer) -> str:
        """Return the text of tokens that were added and not yet returned."""
        written = tokenizer.decode(self._before)
        return tokenizer.decode([*self._before, *self._unwritten])[len(written) :]
