"""The result of a gate: measured value, limit, passed or not."""

from __future__ import annotations

from compress.common.config import Settings


class Verdict(Settings):
    """The result of a gate."""

    gate: str
    """The gate's type."""
    value: float | None
    """What was measured; None when it could not be."""
    limit: float
    """What the value was compared with."""
    passed: bool
    against: str | None
    """Name of the artifact compared with; None where the gate measures the result alone."""
    rule: str
    """The rule with its unit, such as ``size ratio <= 0.25``."""
    reason: str = ""
    """Why it could not be measured."""


def explain(verdict: Verdict) -> str:
    """Format a verdict in one line: the gate, its rule, and the measured value."""
    found = verdict.reason or f"found {verdict.value:.4g}"
    against = f" against {verdict.against}" if verdict.against not in (None, "input") else ""
    return f"{verdict.gate}{against}: {verdict.rule}, {found}"
