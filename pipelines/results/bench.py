"""The result of `compress bench`, and how its figures are worded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.config import Settings
from compress.export.fastest.measure import BenchCell

if TYPE_CHECKING:
    from collections.abc import Iterator


class BenchedModel(Settings):
    """A model that was measured."""

    name: str
    kind: str
    digest: str
    bytes: int
    """Size of the file to deploy."""


class Bench(Settings):
    """Latencies of models, measured in turn."""

    machine: dict[str, str | int | None]
    models: tuple[BenchedModel, ...]
    """The first one is what the others' speedup is against."""
    cells: tuple[BenchCell, ...]
    """Figures of all models, for each number of threads and batch size."""
    not_exported: dict[str, str] = {}
    """Runtimes that were asked for and are not measured, and why."""

    def lines(self) -> Iterator[str]:
        """Yield which model is fastest for each batch size and number of threads."""
        yield from (cell.verdict for cell in self.cells)
        for runtime, reason in self.not_exported.items():
            yield f"{runtime} was not measured: {reason}"
