"""Options and limits of the built-in server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from compress.common.process import usable_cores

if TYPE_CHECKING:
    from compress.serve.shadow.options import ShadowOptions


@dataclass(frozen=True)
class Limits:
    """Bounds beyond which a request is refused."""

    body_bytes: int = 8 * 1024**2
    rows: int = 128
    """Most rows of one request, and of one call of the model."""
    queue: int = 128
    seconds: float = 30.0
    """Time limit from a request's head to its answer."""


@dataclass(frozen=True)
class Options:
    """Options of `compress serve`."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 lets the operating system choose."""
    token: str = field(default="", repr=False)
    workers: int | None = None
    """Threads that call the model; by default as many as fit the cores."""
    processes: int = 1
    """Server processes, each with its own model, threads and queue."""
    threads: int | None = None
    """CPU threads of one call; by default 1, or what an archive records."""
    delay_seconds: float = 0.0
    """How long a request waits for others to form a batch."""
    limits: Limits = field(default_factory=Limits)
    sha256: str | None = None
    """Expected SHA-256 of the deployed file, if the caller knows it."""
    report: Path | None = None
    """report.json of the run that made the artifact; it decides whether requests are batched."""
    stop_seconds: float = 30.0
    """Time limit of the requests in progress when the server is stopped."""
    watch: Path | None = None
    """Folder of artifacts by name and version, whose changes are followed."""
    canaries: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Name → a version on trial, and its share of the requests that name none."""
    repository_api: bool = False
    """Whether clients may load and unload models."""
    grpc_port: int | None = None
    traces: str = ""
    """URL to which OpenTelemetry traces are sent by OTLP over HTTP; empty for none."""
    shadow: ShadowOptions | None = None
    """How a share of the answers is compared with the uncompressed model's; None for not."""

    @property
    def width(self) -> int:
        """Number of threads of each process that call the model."""
        threads_per_worker = (self.threads or 1) * self.processes
        return self.workers or max(1, usable_cores() // threads_per_worker)
