"""Pipelines: `from compress.pipelines import Pipeline` reads a pipeline file and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from compress.pipelines.api import Pipeline as Pipeline

# Not imported at once: every module below imports this one first, also those of a command that
# must start fast, and the settings of all stages take most of a second to import.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"api": ["Pipeline"]})
