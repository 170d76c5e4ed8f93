"""Between a connection and its socket: when bytes are read, and how the socket is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class ReadingFlow(FlowControl):
    """uvicorn pauses reading while a body's bytes wait for the application; and we, on top."""

    _waits_for_application = False
    _held = False

    def pause_reading(self) -> None:
        """Pause on behalf of uvicorn."""
        self._waits_for_application = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume on behalf of uvicorn."""
        self._waits_for_application = False
        if not self._held:
            super().resume_reading()

    def hold(self) -> None:
        """Pause on behalf of the connection."""
        self._held = True
        super().pause_reading()

    def release(self) -> None:
        """Resume on behalf of the connection."""
        self._held = False
        if not self._waits_for_application:
            super().resume_reading()


class LingeringTransport:
    """A transport that is closed as RFC 9112, section 9.6 says: half, then read on for a while.

    Where the client sent bytes that are unread when a socket is closed, the kernel resets the
    connection, and the client may lose an answer that it has not read yet.
    """

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], None]) -> None:
        """Wrap a transport.

        Args:
            transport: the transport.
            linger: called once the sending half is closed.
        """
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info
        self._transport = transport
        self._linger = linger
        self._half_closed = False

    def is_closing(self) -> bool:
        """Return whether nothing can be sent any more."""
        return self._half_closed or self._transport.is_closing()

    def close(self) -> None:
        """Send what was written, and that it was the last."""
        if not self.is_closing():
            self._half_closed = True
            self._transport.write_eof()
            self._linger()
