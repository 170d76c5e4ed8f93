"""What a gate is: it measures one number of a stage's result, and holds it against a limit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from compress.common.config import Settings
from compress.common.errors import CompressError, Unavailable, exits_refused
from compress.core.verdict import Verdict

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


class Gate(Settings):
    """A rule with a limit."""

    gate: str
    against: str | None = None
    """Earlier stage compared with, or `source`; by default the stage's input."""

    limit_field: ClassVar[str]
    """The setting that holds the limit."""
    rule_template: ClassVar[str]
    """The rule in words, with its unit; settings in braces."""
    higher_passes: ClassVar[bool] = False
    """Whether the value must reach the limit, instead of staying under it."""
    compares: ClassVar[bool] = True
    """Whether another artifact is looked at."""
    asks_rows: ClassVar[bool] = False
    """Whether models are asked rows of `val`, as many in a call as they are served with."""

    @property
    def limit(self) -> float:
        """The number that the value is held against."""
        return float(getattr(self, self.limit_field))

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Measure.

        Raises:
            CompressError: it cannot be measured.
        """
        raise NotImplementedError

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return the settings that change the measured value, its limit left out."""
        return self.model_dump(mode="json", exclude={self.limit_field, "against"})

    def evaluate(self, before: Artifact, after: Artifact, context: Context) -> Verdict:
        """Measure and hold against the limit.

        Raises:
            Unavailable: something that the measurement needs is not installed.
        """
        try:
            with exits_refused():
                return self.verdict(self.measure(before, after, context))
        except Unavailable:
            raise
        except CompressError as error:
            return self.verdict(None, str(error))
        except Exception as error:  # noqa: BLE001 - a model or metric of the user's may raise any
            return self.verdict(None, f"{type(error).__name__}: {error}")

    def verdict(self, value: float | None, reason: str = "") -> Verdict:
        """Hold a measured value against the limit; None and NaN never pass."""
        if value is None or not math.isfinite(value):
            value, passed = None, False
            reason = reason or "the measured value is not finite"
        else:
            passed = value >= self.limit if self.higher_passes else value <= self.limit
        return Verdict(
            gate=self.gate,
            value=value,
            limit=self.limit,
            passed=passed,
            against=(self.against or "input") if self.compares else None,
            rule=self.rule_template.format_map(dict(self)),
            reason=reason,
        )
