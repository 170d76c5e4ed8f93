"""How the built-in server serves, and what it takes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


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


@dataclass(frozen=True)
class Options:
    """How a model is served."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 lets the system choose."""
    name: str = "model"
    token: str = field(default="", repr=False)
    workers: int = field(default_factory=cores)
    """Threads that call the model; workers x threads should not exceed the cores."""
    threads: int = 1
    """CPU threads of one call."""
    delay_seconds: float = 0.0
    """How long a request waits to be joined by others."""
    limits: Limits = field(default_factory=Limits)
    stop_seconds: float = 30.0
    """How long requests that run may take once the server is told to stop."""
