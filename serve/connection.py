"""A connection of uvicorn's that gives up on clients which send no request, or read no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

HEAD_SECONDS = 10.0
"""How long a request's head may take, and a new connection may be silent."""
HEAD_BYTES = 64 * 1024


class BoundedConnection(HttpToolsProtocol):
    """uvicorn bounds the time between requests; this bounds that of their heads, and their size."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _unfinished_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline."""
        self._head_is_here()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Wait for the rest of a request's head, not for ever."""
        super().on_message_begin()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Read on; of a header that does not end, the parser would keep everything."""
        self._unfinished_bytes += len(data)
        super().data_received(data)
        if self._unfinished_bytes > HEAD_BYTES:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        """Keep a part of the path, which counts to the head."""
        if self._has_room(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; of one that is too much for all of them, the connection is dropped."""
        if self._has_room(len(name) + len(value)):
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, which has a limit of its own."""
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Start the request, which has a deadline of its own."""
        self._head_is_here()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection at once, even if its answer was not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _has_room(self, size: int) -> bool:
        self._unfinished_bytes = 0
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            self.transport.abort()
        return self._head_bytes <= HEAD_BYTES

    def _expect_head(self) -> None:
        self._head_is_here()
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _head_is_here(self) -> None:
        self._head_bytes = self._unfinished_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
