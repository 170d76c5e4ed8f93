"""Settings of a training's checkpoints."""

from __future__ import annotations

from compress.common.config import Count, Settings


class Checkpoints(Settings):
    """When a training leaves its state on disk, to go on from after an interruption.

    There is one after every epoch. None of these settings changes the trained weights.
    """

    every_steps: Count | None = None
    """Steps between checkpoints within an epoch; by default none but that at its end."""
    keep: Count = 2
    """Newest checkpoints that are kept, beside that of the epoch whose weights are kept."""
    asynchronous: bool = True
    """Whether a checkpoint is written while training goes on, from a copy in main memory."""
