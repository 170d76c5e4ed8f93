"""Options of `compress serve --shadow`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WRITE_SECONDS = 1.0
"""Between two times that what was found is written, and shown in `/metrics`."""


@dataclass(frozen=True)
class ShadowOptions:
    """How answers are compared with the uncompressed model's."""

    artifact: Path
    """What answers the clients, as it was named."""
    share: float
    """Share of the requests that the uncompressed model answers, too."""
    state: Path
    """File of what the comparisons have shown."""
    model: Path | None = None
    """The uncompressed model; by default what the run compared the artifact with."""
    percent: float | None = None
    """Limit of other answers; by default what the run's gate `max_disagreement` certified."""
    decides_readiness: bool = False
    """Whether the server is not ready once the limit is broken."""
