"""Which processes of a run have stopped without a word: a machine that is gone, say."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._C._distributed_c10d import Store

SECONDS_BETWEEN_BEATS = 2.0
SECONDS_TO_BE_LOST = 120.0
"""Longer than a process may be busy in an extension that lets no other thread of Python run."""


class Heartbeat:
    """A thread that counts in the key-value store, and watches the counts of other ranks."""

    def __init__(self, store: Store, rank: int, watched: Iterable[int]) -> None:
        self.store: Any = store  # torch's types lack `clone`
        self.rank, self.watched = rank, list(watched)
        self.lost: str | None = None
        """What to say of a rank that has stopped counting."""

    def start(self) -> None:
        """Count from now on, until this process ends or the store does."""
        # A connection of its own: a request on the other would wait for the answer to this one.
        self.store = self.store.clone()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def raise_if_lost(self) -> None:
        """Raise StageFailed if a watched rank has stopped counting."""
        if self.lost:
            raise StageFailed(self.lost)

    def _run(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        for count in range(2**62):
            try:
                self.store.set(f"alive/{self.rank}", str(count))
                for rank in self.watched:
                    key, now = f"alive/{rank}", time.monotonic()
                    value = self.store.get(key) if self.store.check([key]) else b""
                    before, since = seen.setdefault(rank, (value, now))
                    if value != before:
                        seen[rank] = value, now
                    elif now - since > SECONDS_TO_BE_LOST:
                        self.lost = (
                            f"rank {rank} has sent no heartbeat for {SECONDS_TO_BE_LOST:.0f} s: "
                            "its machine or the network failed, or something has stopped it"
                        )
            except RuntimeError:  # the store has ended, as whoever uses it reports
                return
            time.sleep(SECONDS_BETWEEN_BEATS)
