"""Between a connection and its socket: when bytes are read, time limits, how it is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class HoldableFlowControl(FlowControl):
    """Reads only while neither uvicorn (application behind on a body) nor the connection pauses."""

    _paused_by_uvicorn = False
    _held = False

    def pause_reading(self) -> None:
        """Pause on behalf of uvicorn."""
        self._paused_by_uvicorn = True
        super().pause_reading()

    def resume_reading(self) -> None:
        """Resume on behalf of uvicorn."""
        self._paused_by_uvicorn = False
        if not self._held:
            super().resume_reading()

    def hold_reading(self) -> None:
        """Pause on behalf of the connection."""
        self._held = True
        super().pause_reading()

    def release_reading(self) -> None:
        """Resume on behalf of the connection."""
        self._held = False
        if not self._paused_by_uvicorn:
            super().resume_reading()


class Deadline:
    """The one time limit of a connection, which changes several times in each request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create it without a time limit."""
        self._loop = loop
        self._time = 0.0
        self._on_timeout: Callable[[], None] | None = None
        # It ends at the deadline or before, and is only then set anew: timers cost more.
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        """Call a function after so many seconds, and not what was to be called before."""
        self._time, self._on_timeout = self._loop.time() + seconds, on_timeout
        if self._timer is None or self._timer.when() > self._time:
            self._set_timer(seconds)

    def cancel(self) -> None:
        """Remove the time limit."""
        self._on_timeout = None

    def close(self) -> None:
        """Remove the time limit, and the timer."""
        self._on_timeout = None
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        on_timeout, left = self._on_timeout, self._time - self._loop.time()
        if on_timeout is not None and left > 0:
            self._set_timer(left)
        elif on_timeout is not None:
            self._on_timeout = None
            on_timeout()


class LingeringTransport:
    """A transport closed as RFC 9112, section 9.6 advises: its sending half first, then all of it.

    If a socket is closed while bytes from the client are unread, the kernel resets the connection,
    and the client may lose a response that it has not read yet.
    """

    def __init__(self, transport: asyncio.Transport, on_half_closed: Callable[[], None]) -> None:
        """Wrap a transport; `on_half_closed` has to close it once the sending half is."""
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info
        self._transport = transport
        self._on_half_closed = on_half_closed
        self._half_closed = False

    def is_closing(self) -> bool:
        """Return whether nothing can be sent any more."""
        return self._half_closed or self._transport.is_closing()

    def close(self) -> None:
        """Send what was written, then close the sending half."""
        if not self.is_closing():
            self._half_closed = True
            self._transport.write_eof()
            self._on_half_closed()
