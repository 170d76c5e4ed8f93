"""The greedy text that a folder was proven with, which its runtime has to generate again."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.errors import ArtifactInvalid, StageFailed
from compress.export.genai.runtime import Sampling, next_scores, next_tokens_unlocked

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

FILE = "greedy_text.json"


class GreedyText(NamedTuple):
    """Token ids of a prompt and of its continuation, which was compared with the source's."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    limit: float
    """Difference of two scores, by their spread, below which both tokens are right."""

    def write(self, folder: Path) -> None:
        """Write the file in a folder."""
        content = json.dumps(self._asdict())
        (folder / FILE).write_text(content + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> GreedyText:
        """Return the text of a folder, which was verified; raise ArtifactInvalid without one."""
        try:
            found = json.loads((folder / FILE).read_text(encoding="utf-8"))
            return cls(tuple(found["prompt"]), tuple(found["tokens"]), found["limit"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactInvalid(
                f"{folder}: has no {FILE} to compare answers with ({type(error).__name__}); run "
                "export_genai again"
            ) from error

    def check(self, model: Any) -> None:
        """Generate the text with onnxruntime-genai, up to the first near-tie or end of a text.

        Raises:
            StageFailed: it generates another token, whose score is not nearly the same.
        """
        if not self.tokens:  # the context has no room for any
            return
        found = [*next_tokens_unlocked(model, self.prompt, len(self.tokens), Sampling())]
        for place, (expected, chosen) in enumerate(zip(self.tokens, found, strict=False)):
            if expected == chosen:
                continue
            scores = next_scores(model, [*self.prompt, *self.tokens[:place]])
            gap = float(abs(scores[chosen] - scores[expected]))
            spread = float(scores.max() - scores.min())
            if not gap <= self.limit * spread:
                raise StageFailed(
                    f"onnxruntime-genai generates {chosen} as token {place + 1} of the text that "
                    f"the export was proven with, expected {expected}: their scores differ by "
                    f"{gap:.2g} of {spread:.3g}"
                )
            logger.info(
                "texts are equal for %d tokens; then %d and %d are near a tie: %.2g apart of %.3g",
                *(place, expected, chosen, gap, spread),
            )
            return
