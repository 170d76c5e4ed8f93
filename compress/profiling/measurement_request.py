"""What the process that measures peak memory is asked for."""

from __future__ import annotations

from typing import NamedTuple


class MeasurementRequest(NamedTuple):
    """An artifact to measure, and the environment of the process that requests it."""

    module: str
    """Module of the artifact's class."""
    name: str
    """Qualified name of the artifact's class."""
    path: str
    device: str
    threads: int
    inputs: str
    """File of the model's inputs, a list of batches."""
    imports: tuple[str, ...]
    """Modules that opening the artifact imports, as far as known."""
    folder: str
    """Working directory; empty where it was removed."""
    search: list[str]
    """``sys.path``."""
    environment: dict[str, str]
