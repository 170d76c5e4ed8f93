"""A fair asyncio semaphore that counts bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class ByteSemaphore:
    """Bounds the bytes that requests hold together; the others wait, first in, first out."""

    def __init__(self, capacity: int) -> None:
        """Create a semaphore of so many bytes."""
        self._capacity = self._free = capacity
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator[None]:
        """Wait until `count` bytes are free, at most the capacity, and reserve them."""
        count = min(count, self._capacity)
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            # Also after a cancellation: before the turn came, or in it.
            if turn.done() and not turn.cancelled():
                self._free += count
            else:
                turn.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._queue:
            count, turn = self._queue[0]
            if not turn.cancelled():
                if count > self._free:
                    return
                self._free -= count
                turn.set_result(None)
            self._queue.popleft()
