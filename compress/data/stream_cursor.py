"""`StreamCursor`: where the reading of a stream stands, as a checkpoint records it."""

from __future__ import annotations

from pydantic import JsonValue

from compress.common.config import Settings


class StreamCursor(Settings):
    """Where the reading of a stream stands."""

    index: int = 0
    """Number of the next sample, counted over the whole training."""
    passes: int = 0
    """Finished passes over the stream."""
    offset: int = 0
    """Samples read in this pass."""
    state: JsonValue = None
    """The dataset's `state_dict()` there; None if it has none: the pass is then read again."""
