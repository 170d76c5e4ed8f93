"""Imports for a command that is waited for: without what nobody will look at."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.common.process import gc_disabled

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def enabled() -> Iterator[None]:
    """Import settings without their descriptions in a block, and collect no garbage.

    The collector is kept from what is imported, now and later: it all stays. Descriptions are for
    the schema, and finding them in the sources took two fifths of the time.
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
