"""Texts and token ids of a folder of `export_genai`, by the `tokenizer.json` that it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.artifacts.carried_files import TOKENIZER
from compress.common.errors import ArtifactInvalid, first_line
from compress.common.requirements import Requirement, pip_install

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.artifacts.artifact import Artifact

TOKENIZERS = Requirement(what="tokenizers", install=pip_install("genai"))
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What the bytes of half a character are decoded to."""


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
        try:
            self._tokenizer = Tokenizer.from_str(content.decode())
        except Exception as error:
            raise ArtifactInvalid(
                f"{artifact.path / TOKENIZER}: tokenizers cannot read it: {first_line(error)}"
            ) from error
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
