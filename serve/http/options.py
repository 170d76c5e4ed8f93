"""How the built-in server serves, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - a dataclass field

from compress.common.process import usable_cores


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
    workers: int | None = None
    """Threads that call the model; as many as the cores allow, where left out."""
    processes: int = 1
    """Processes that answer, each with its own model, threads and queue."""
    threads: int | None = None
    """CPU threads of one call; 1, or what an archive says, where left out."""
    delay_seconds: float = 0.0
    """How long a request waits to be joined by others."""
    limits: Limits = field(default_factory=Limits)
    sha256: str | None = None
    """What the deployed file must hash to, where it was told."""
    report: Path | None = None
    """report.json of the run that made the artifact, which decides whether requests are joined."""
    stop_seconds: float = 30.0
    """How long requests that run may take once the server is told to stop."""

    @property
    def width(self) -> int:
        """Number of threads of each process that call the model."""
        taken = (self.threads or 1) * self.processes
        return self.workers or max(1, usable_cores() // taken)
