"""The callback through which a stage reports how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Callback through which a stage reports how far it is."""

    def __call__(self, task: str, done: int, total: int, note: str = "") -> None:
        """Report that ``done`` of ``total`` steps of a task are done; ``note`` is shown with it."""
        ...


def silent(task: str, done: int, total: int, note: str = "") -> None:
    """Ignore the report: the default where nothing shows progress."""
