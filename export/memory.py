"""Memory that is no longer needed, given back to the system."""

from __future__ import annotations

import ctypes
import gc


def give_back() -> None:
    """Collect what graphs hold in circles, and let the C library return what it keeps for later.

    Between two steps of an export: what one let go would lie beside what the next one takes.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
