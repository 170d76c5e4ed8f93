"""The open connections of a server that wait for their clients, and how many may be open."""

from __future__ import annotations

import resource
import time
from typing import Protocol

CONNECTIONS = 1024
"""Open connections above which those are closed that have waited longest for their clients."""
MOST_CONNECTIONS = 4096
"""Above this they are closed however short they have waited."""
GRACE_SECONDS = 1.0
"""A new connection has so long to send its request: many are accepted at once, and the one with a
request may be the first of them."""
OTHER_FILES = 128
"""File descriptors that are left for all but connections."""


class Connection(Protocol):
    """A connection that can be closed to make room for another."""

    def give_up(self) -> None:
        """Close it at once."""


class WaitingConnections:
    """Connections that wait for their clients, the one that has waited longest first.

    It has sent no whole request, or does not read its answer. Connections whose request is being
    answered are not among them, and are bounded by the queue.
    """

    def __init__(self) -> None:
        """Bound connections by the files that this process may open, and raise that limit."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_CONNECTIONS + OTHER_FILES
        if soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._most = max(16, min(MOST_CONNECTIONS, soft - OTHER_FILES))
        self._usual = min(CONNECTIONS, self._most // 2)
        self._since: dict[Connection, float] = {}

    def add(self, connection: Connection) -> None:
        """Remember that a connection waits from now on."""
        self._since.pop(connection, None)
        self._since[connection] = time.monotonic()

    def discard(self, connection: Connection) -> None:
        """Forget a connection that does not wait."""
        self._since.pop(connection, None)

    def make_room(self, count: int) -> None:
        """Give connections up, where so many are open that new ones would find no place.

        Args:
            count: open connections.
        """
        young = time.monotonic() - GRACE_SECONDS
        while self._since and count > self._usual:
            longest, since = next(iter(self._since.items()))
            if since > young and count <= self._most:
                return
            del self._since[longest]
            longest.give_up()
            count -= 1
