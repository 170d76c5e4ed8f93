"""What the built-in server takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds beyond which a request is refused."""

    body_bytes: int = 8 * 1024**2
    rows: int = 128
    """Rows of one request, and of one call of the model."""
    queue: int = 128
    """Requests that may wait or be answered at once."""
    seconds: float = 30.0
    """From a request's head to its answer."""
