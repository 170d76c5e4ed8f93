"""Open a folder of `export_genai` for the server, after it has generated its proof again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.requirements import require_all
from compress.export.genai.runtime import (
    GENAI,
    GenaiConfig,
    GreedyText,
    next_tokens,
    next_tokens_unlocked,
    open_folder,
)
from compress.export.genai.text import TOKENIZERS
from compress.serve.http.base_app import SMALL_BYTES
from compress.serve.http.options import Limits

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.export.genai.runtime import Sampling
    from compress.serve.http.options import Options

TOKEN_BYTES = 256
"""Bytes of a token in JSON, at most; longer ones are rare, and a text has few of them."""


@dataclass(frozen=True)
class ServedDecoder:
    """A decoder, opened by onnxruntime-genai."""

    name: str
    digest: str
    """Digest of the artifact."""
    context: int
    """Tokens of a prompt and its answer together, at most."""
    end_tokens: frozenset[int]
    """Tokens that end a text."""
    folder: Path
    """The artifact's."""
    _model: Any
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def longest_body(self) -> int:
        """Bytes beyond which a body cannot hold a prompt that the context has room for."""
        return SMALL_BYTES + TOKEN_BYTES * self.context

    def generate(
        self, prompt: Sequence[int], count: int, sampling: Sampling
    ) -> Generator[int, None, None]:
        """Yield up to so many next tokens, until one that ends the text."""
        if sampling.seed is None or not sampling.temperature:
            return next_tokens_unlocked(self._model, prompt, count, sampling)
        return next_tokens(self._model, prompt, count, sampling)


def refuse_for_decoders(artifact: Artifact, options: Options) -> None:
    """Refuse options without a meaning here, and machines without what opens such a folder.

    Raises:
        PipelineInvalid: an option is about rows of tensors.
        Unavailable: onnxruntime-genai or tokenizers is not installed.
    """
    if options.report is not None or options.limits.rows != Limits().rows:
        raise PipelineInvalid(
            f"{artifact.path}: a decoder answers each request alone: leave --report and --max-rows "
            "out; --workers is how many are answered at a time"
        )
    require_all([GENAI, TOKENIZERS], str(artifact.path))


def open_decoder(artifact: Artifact, name: str, threads: int) -> ServedDecoder:
    """Open a folder, after its digests were checked, and generate the text of its proof.

    Raises:
        ArtifactInvalid: a file is not the one that was sealed.
        StageFailed: it generates another text than the one that was compared with the source's.
    """
    artifact.verify()
    text = GreedyText.read(artifact.path)
    model = open_folder(artifact.path, threads)
    try:
        text.check(model)
    except StageFailed as error:
        raise StageFailed(f"{artifact.path}: {error}") from error
    ends = GenaiConfig.read(artifact.path).model.eos_token_id
    return ServedDecoder(
        name=name,
        digest=artifact.digest,
        context=int(artifact.fact("context")),
        end_tokens=frozenset([ends] if isinstance(ends, int) else ends),
        folder=artifact.path,
        _model=model,
    )
