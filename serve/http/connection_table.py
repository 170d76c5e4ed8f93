"""The open connections of a server that wait for their clients, and how many may be open."""

from __future__ import annotations

import resource
import time
from typing import Protocol

CONNECTIONS = 1024
"""Above this, the connections that have waited longest for their clients are closed."""
MAX_CONNECTIONS = 4096
"""Above this, they are closed even if they have waited less than GRACE_SECONDS."""
GRACE_SECONDS = 1.0
"""Time for a new connection to send its request: many are accepted at once, and the one with a
request may be the first of them."""
OTHER_FILES = 128
"""File descriptors reserved for everything but connections."""


class Connection(Protocol):
    """A connection that can be closed in favour of another."""

    def close_now(self) -> None:
        """Close it at once."""


class WaitingConnections:
    """Connections that wait for their clients, ordered by how long they have waited.

    Such a client has not sent a complete request, or does not read its response. Connections whose
    request is being answered are not in the table: the queue's size bounds them.
    """

    def __init__(self) -> None:
        """Raise the limit of open files, and derive the limit of connections from it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = MAX_CONNECTIONS + OTHER_FILES
        if soft < needed:
            soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._hard_limit = max(16, min(MAX_CONNECTIONS, soft - OTHER_FILES))
        self._soft_limit = min(CONNECTIONS, self._hard_limit // 2)
        self._waiting_since: dict[Connection, float] = {}

    def add(self, connection: Connection) -> None:
        """Add a connection that waits from now on, or restart its waiting time."""
        self._waiting_since.pop(connection, None)
        self._waiting_since[connection] = time.monotonic()

    def discard(self, connection: Connection) -> None:
        """Remove a connection that does not wait."""
        self._waiting_since.pop(connection, None)

    def make_room(self, open_connections: int) -> None:
        """Close the connections that have waited longest, while too many are open."""
        grace_start = time.monotonic() - GRACE_SECONDS
        while self._waiting_since and open_connections > self._soft_limit:
            oldest, since = next(iter(self._waiting_since.items()))
            if since > grace_start and open_connections <= self._hard_limit:
                return
            del self._waiting_since[oldest]
            oldest.close_now()
            open_connections -= 1
