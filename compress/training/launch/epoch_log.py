"""Epochs told from the training processes to their parent, as JSON lines in a file."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.training.loop.step_metrics import EpochMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Tell = Callable[[EpochMetrics], None]

JOURNAL = "epochs.jsonl"
SECONDS_BETWEEN_LOOKS = 0.1


def append_epoch(folder: Path, epoch: EpochMetrics) -> None:
    """Append a line."""
    with (folder / JOURNAL).open("a", encoding="utf-8") as stream:
        stream.write(epoch.model_dump_json() + "\n")


@contextmanager
def following(folder: Path, tell: Tell) -> Iterator[None]:
    """Tell every epoch appended during a block, from a thread, the last one before the block ends.

    Args:
        folder: where the journal is; an older one is removed.
        tell: called once for each epoch.
    """
    (folder / JOURNAL).unlink(missing_ok=True)
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(folder / JOURNAL, tell, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(file: Path, tell: Tell, over: threading.Event) -> None:
    told = 0
    last_look = False
    while not last_look:
        last_look = over.wait(SECONDS_BETWEEN_LOOKS)
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        for line in whole_lines[told:]:
            tell(EpochMetrics.model_validate_json(line))
        told = len(whole_lines)
