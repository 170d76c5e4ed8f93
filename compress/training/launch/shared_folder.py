"""Files that another machine has written on a shared file system."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS_TO_BE_VISIBLE = 30.0
"""NFS clients cache the entries of a folder, by default for up to 30 s (acdirmin)."""
SECONDS_BETWEEN_POLLS = 0.2


def wait_until_visible(path: Path, is_visible: Callable[[], bool]) -> bool:
    """Wait some seconds for what another machine has written; return whether it is visible."""
    deadline = time.monotonic() + SECONDS_TO_BE_VISIBLE
    while not is_visible():
        if time.monotonic() > deadline:
            return False
        # Listing a folder makes an NFS client ask its server.
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208 - cheaper than a generator that is exhausted
        time.sleep(SECONDS_BETWEEN_POLLS)
    return True
