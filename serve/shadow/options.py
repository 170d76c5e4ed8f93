"""Options of `compress serve --shadow`, and what the comparing process is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from compress.common.signature import Signature


WRITE_SECONDS = 1.0
"""Between two times that what was found is written, and shown in `/metrics`."""


@dataclass(frozen=True)
class ShadowOptions:
    """Options of `compress serve --shadow`."""

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


class Asked(NamedTuple):
    """What a server asks its process to do."""

    options: ShadowOptions
    digest: str
    """Of the artifact that answers the clients."""
    signature: Signature
    report: Path | None
    """report.json of the run that made it; by default the one in its run's folder."""
