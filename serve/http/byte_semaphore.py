"""A semaphore that counts bytes: who asks first gets them first."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class ByteSemaphore:
    """Lets requests hold so many bytes together; the others wait."""

    def __init__(self, most: int) -> None:
        """Begin with nothing held.

        Args:
            most: bytes that may be held.
        """
        self._most = self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def holding(self, count: int) -> AsyncIterator[None]:
        """Wait for room, and hold it; more than all of it counts as all."""
        count = min(count, self._most)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            # Also where it was cancelled: before its turn, or in it.
            if turn.done() and not turn.cancelled():
                self._free += count
            else:
                turn.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.cancelled():
                if count > self._free:
                    return
                self._free -= count
                turn.set_result(None)
            self._waiting.popleft()
