"""JSON in canonical form, and without duplicate keys."""

from __future__ import annotations

import json
from typing import Any


def canonical_json(value: Any) -> str:
    """Return the same JSON for equal values; raise ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from pairs for ``json.loads``; raise ValueError if a key stands twice."""
    # Of two equal keys some readers take the first and others the last, so that two programs could
    # see two different files.
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:80]!r} stands twice")
        found[key] = value
    return found
