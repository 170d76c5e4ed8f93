"""Pipelines: `from compress.pipelines import Pipeline` reads a pipeline file and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.pipelines.api import Pipeline

__all__ = ["Pipeline"]


def __getattr__(name: str) -> Any:
    # Not imported at once: every module below imports this one first, also those of a command that
    # must start fast, and the settings of all stages take most of a second to import.
    if name == "Pipeline":
        from compress.pipelines.api import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
