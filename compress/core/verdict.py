"""What a gate found."""

from __future__ import annotations

from compress.common.config import Settings


class Verdict(Settings):
    """What a gate found."""

    gate: str
    """The gate's type."""
    value: float | None
    """What was measured; None when it could not be."""
    limit: float
    """What it was held against."""
    passed: bool
    against: str | None
    """Name of the artifact compared with; None where the gate looks at the result alone."""
    rule: str
    """The rule in words, with its unit."""
    reason: str = ""
    """Why it could not be measured."""


def explain(verdict: Verdict) -> str:
    """Return one line: the rule and what was found."""
    found = verdict.reason or f"found {verdict.value:.4g}"
    against = f" against {verdict.against}" if verdict.against not in (None, "input") else ""
    return f"{verdict.gate}{against}: {verdict.rule}, {found}"
