"""Settings of training checkpoints."""

from __future__ import annotations

from compress.common.config import Count, Settings


class Checkpoints(Settings):
    """When training writes checkpoints, from which it resumes after an interruption.

    There is one after every epoch. None of these settings changes the trained weights.
    """

    every_steps: Count | None = None
    """Steps between further checkpoints within an epoch; by default there are none."""
    keep: Count = 2
    """Number of newest checkpoints to keep, besides that of the best epoch."""
    asynchronous: bool = True
    """Whether checkpoints are written while training continues, from a copy in main memory."""
