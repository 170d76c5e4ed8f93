"""The callback through which a stage reports how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Where a stage says how far it is."""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Say that ``done`` of ``total`` steps of a task are done; ``note`` is shown beside it."""
        ...


def silent(task: str, done: int, total: int, note: str = "") -> None:
    """Say nothing."""
