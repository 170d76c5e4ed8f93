"""Options of `compress serve --shadow`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Drawn: TypeAlias = tuple[Sequence[Any], Sequence[Any], int | None]
"""Inputs of a request, what was answered, and the row that counts; None for the worst."""
Judge: TypeAlias = Callable[[list[Any], list[Any]], tuple[Any, Sequence[float]]]
"""Returns a figure of each row of inputs and of what was answered, the largest of the worst, and
figures of the whole call."""


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
    reference: Path | None = None
    """Rows such as those of `val`, which requests are compared with in place of answers of an
    uncompressed model."""
    decides_readiness: bool = False
    """Whether the server is not ready once there is an alarm."""
