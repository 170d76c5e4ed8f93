"""Gates on how fast a language model generates, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from compress.common.config import Count, Positive
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


class _GenerationGate(Gate):
    """A gate on a folder that generates text by itself, with a cache of keys and values."""

    prompt_tokens: Count = 128
    """Tokens of the prompt, drawn at random."""
    tokens: Count = 64
    """Tokens generated after it."""

    compares: ClassVar[bool] = False
    may_vary: ClassVar[bool] = True

    def _speed(self, after: Artifact, context: Context) -> tuple[float, float]:
        """Return milliseconds to the first token, and tokens a second after it."""
        if problem := self.unsuitable_artifact(type(after)):
            raise StageFailed(problem)
        return after.generation_speed(self.prompt_tokens, self.tokens, context.threads)

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why such a result does not generate."""
        return "" if written.generates else f"is for export_genai, found {written.kind}"


class MinTokensPerSecond(_GenerationGate):
    """A language model generates so many tokens a second, one at a time after a prompt."""

    gate: Literal["min_tokens_per_second"] = "min_tokens_per_second"
    at: Positive
    """Least tokens a second, by the median time of a token."""

    limit_field: ClassVar[str] = "at"
    rule_template: ClassVar[str] = "tokens a second after {prompt_tokens} >= {at:g}"
    higher_passes: ClassVar[bool] = True

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the tokens a second after the first."""
        return self._speed(after, context)[1]


class MaxFirstToken(_GenerationGate):
    """The first token comes soon: a prompt is read in little time."""

    gate: Literal["max_first_token"] = "max_first_token"
    ms: Positive
    """Largest median time from the prompt to the first token, in milliseconds."""

    limit_field: ClassVar[str] = "ms"
    rule_template: ClassVar[str] = "first token after {prompt_tokens} <= {ms:g} ms"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the milliseconds to the first token."""
        return self._speed(after, context)[0]
