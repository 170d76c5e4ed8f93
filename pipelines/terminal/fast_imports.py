"""Faster imports for commands that run a pipeline or a server."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.common.process import gc_disabled

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def enabled() -> Iterator[None]:
    """Skip pydantic's attribute docstrings and garbage collection during imports in a block.

    Docstrings are only used by `compress schema`, and parsing sources for them took two fifths of
    the import time. Imported objects live until the end, so they are frozen out of the collector.
    """
    from compress.common.config import Settings

    described = "use_attribute_docstrings"
    with gc_disabled():
        Settings.model_config[described] = False  # type: ignore[literal-required]
        try:
            yield
        finally:
            Settings.model_config[described] = True  # type: ignore[literal-required]
            gc.freeze()
