"""The end of a search's time, for steps that report their progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from compress.core.progress import Progress


class OutOfTime(StageFailed):
    """The time of a search was over before something that it had begun was done."""


def progress_until(deadline: float, progress: Progress) -> Progress:
    """Return a callback that raises OutOfTime once a deadline of `time.monotonic` is over.

    Not after a task's last step: what is done is not thrown away.
    """

    def report(task: str, done: int, total: int, note: str = "") -> None:
        if time.monotonic() > deadline and done < total:
            where = f"{task}, {note or 'step'} {done} of {total}"
            raise OutOfTime(f"there was no more time ({where}); allow more --time")
        progress(task, done, total, note)

    return report
