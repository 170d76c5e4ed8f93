"""A connection of uvicorn's that bounds what one client can make the server hold or do.

uvicorn's httptools connection parses everything that it reads at once, and reads on whenever one of
the parsed requests was answered: a client that sends small requests without reading the answers
makes it hold any number of them. Here a connection has one request under way, and the rest stays in
the kernel's buffers, so that TCP slows the client down.
"""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serve.http.flow_control import LingeringTransport, ReadingFlow

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from serve.http.connection_table import WaitingConnections

HEAD_SECONDS = 10.0
"""How long a request's head may take, and a new connection may be silent."""
HEAD_BYTES = 64 * 1024
"""Size of a head; also of what lies between two parts of a chunked body, and behind its last."""
HEADERS = 128
"""Headers of one request."""
READ_BYTES = 4 * 1024
"""Read at once, but for a body of known length: that is parsed in no time."""
BODY_READ_BYTES = 64 * 1024
CHUNKED_STEP_BYTES = 1024
"""Parsed at once of a chunked body. Its end is not known before it is parsed, and small requests
that follow it in the same step are all parsed: 1024 bytes hold 56 of them at most."""
STALL_SECONDS = 10.0
"""After which a client that has read nothing of its answer is given up."""
LINGER_SECONDS = 2.0
LINGERING_BYTES = 1024**2
"""How far a connection is read on after its last answer; see `LingeringTransport`."""
DISCARDED_BYTES = 64 * 1024**2
"""A body whose request was refused is read on up to so many bytes: many clients read no answer
before they have sent everything."""
DISCARD_SECONDS = 30.0
DRAIN_SECONDS = 1.0
"""Once the server is told to stop, how long an idle connection is kept for a request that may be on
its way."""


class Refusal(Exception):
    """What the parser met is answered with an error, and the connection closed."""

    def __init__(self, status: int, message: str) -> None:
        """Remember the answer."""
        super().__init__(message)
        self.status = status


class BoundedConnection(HttpToolsProtocol):
    """Reads one request at a time, each part of it with a deadline and a size."""

    _raw: asyncio.Transport
    flow: ReadingFlow
    _deadline: asyncio.TimerHandle | None = None
    _task: asyncio.Task[None] | None = None
    _running: RequestResponseCycle | None = None
    """The request under way, and what answers it."""
    _unparsed = b""
    """What was read behind the request under way: READ_BYTES at most."""
    _in_head = False
    _in_body = False
    _chunked = False
    _body_left = 0
    """Bytes of a body that are not here yet; 0 where it is chunked, and that is not known."""
    _idle_bytes = 0
    """Bytes parsed since the head began, or since the last of a body's bytes."""
    _discarded_bytes = 0
    _offers_upgrade = False
    _lingers = False
    _drains = False

    def __init__(self, *args: Any, waiting: WaitingConnections, **options: Any) -> None:
        """Join a server.

        Args:
            args: as uvicorn gives them.
            waiting: the server's connections that wait for their clients.
            options: as uvicorn gives them.
        """
        super().__init__(*args, **options)
        self._usual_parser = self.parser
        self._waiting = waiting

    # What the transport calls

    def connection_made(self, transport: Any) -> None:
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self._raw = transport
        self.transport = LingeringTransport(transport, self._linger)  # type: ignore[assignment]
        self.flow = ReadingFlow(transport)
        self._within(HEAD_SECONDS, self._raw.abort)
        self._waiting.add(self)
        self._waiting.make_room(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Give up the request under way: nobody waits for its answer."""
        self._within(None)
        self._unset_keepalive_if_required()
        self._waiting.discard(self)
        self._unparsed = b""
        self._usual_parser = None  # type: ignore[assignment]  # it refers to this connection
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._task is not None and self._running is not None:
            self._running.disconnected = True
            self._task.cancel()

    def bytes_to_read(self) -> int:
        """Return how many bytes may be read at once."""
        known = self._body_left if self._in_body else 0
        return max(READ_BYTES, min(known, BODY_READ_BYTES))

    def data_received(self, data: bytes) -> None:
        """Parse what was read, then let other connections have their turn."""
        if self._lingers:
            self._discard(len(data), LINGERING_BYTES)
            return
        if self._in_body and self.cycle.response_complete:
            self._discard(len(data), DISCARDED_BYTES)
        self._parse(data)
        if len(data) == READ_BYTES and not self._unparsed and not self._body_left:
            # The loop would read up to 32 times in a row: cheap for bodies, not for many heads.
            self.flow.hold()
            self.loop.call_soon(self._read_on)

    def pause_writing(self) -> None:
        """Wait until the client reads its answers, not for ever."""
        super().pause_writing()
        self._waiting.add(self)
        if not self._lingers:
            self._expect_progress(self._raw.get_write_buffer_size(), self._read_on)

    def resume_writing(self) -> None:
        """Go on with what was held back."""
        super().resume_writing()
        if self._lingers:
            return
        self._within(None)
        if self._is_idle():
            self._become_idle()
        else:
            self._waiting.discard(self)
        self._read_on()

    # What the parser calls

    def on_message_begin(self) -> None:
        """Wait for the rest of a request's head, not for ever."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head, self._body_left, self._chunked = True, 0, False
        if self._is_idle():
            self._within(HEAD_SECONDS, self._raw.abort)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, but none that follows a body: those are not the request's."""
        if self._in_body:
            return
        super().on_header(name, value)
        if len(self.headers) > HEADERS:
            raise Refusal(431, f"the request has more than {HEADERS} headers")
        name = self.headers[-1][0]
        if name == b"content-length":
            self._body_left = int(value)
        elif name == b"transfer-encoding":
            self._chunked = True
            if value.lower() != b"chunked":
                raise Refusal(
                    400, f"Transfer-Encoding is {value.decode('latin-1')[:40]!r}, expected chunked"
                )

    def on_headers_complete(self) -> None:
        """Start the request, which has a deadline of its own."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise Refusal(400, f"the request is HTTP/{version}, expected HTTP/1.1")
        self._within(None)
        self._waiting.discard(self)
        self._in_head, self._in_body = False, True
        self._idle_bytes = self._discarded_bytes = 0
        super().on_headers_complete()
        self._offers_upgrade = self.parser.should_upgrade()
        ends_unclearly = self._offers_upgrade and self._chunked  # see _parser_of_body
        if self._drains or self._body_left > DISCARDED_BYTES or ends_unclearly:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body, which has a limit of its own."""
        self._idle_bytes = 0
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect another request."""
        if self._offers_upgrade:
            self._offers_upgrade = False
            if self._body_left or self._chunked:
                return  # httptools takes the body for the other protocol
        self.parser = self._usual_parser
        self._in_body = False
        super().on_message_complete()
        if self.cycle.response_complete:  # it was refused before its body was here
            self._become_idle()

    # What uvicorn calls

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start a request as uvicorn does, and keep its task."""
        self._running = cycle
        self._task = self.loop.create_task(cycle.run_asgi(app))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for it."""
        self._task = self._running = None
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_idle():
            self._become_idle()
        self._read_on()

    def shutdown(self) -> None:
        """Close once the request under way was answered, or where none comes shortly."""
        self._drains = True
        if self._is_idle():
            self.loop.call_later(DRAIN_SECONDS, self._close_if_idle)
        else:
            self.cycle.keep_alive = False

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no request came."""
        self.give_up()

    # What is ours

    def give_up(self) -> None:
        """Close a connection that waits for its client, at once."""
        self.connections.discard(self)
        if self._raw.get_write_buffer_size():
            self._raw.abort()
        else:
            self._raw.close()

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of one request; the rest waits for its answer."""
        at = 0
        while at < len(data) and self._may_parse():
            end = self._end_of_step(data, at)
            self._idle_bytes += end - at
            try:
                self.parser.feed_data(data[at:end] if at or end < len(data) else data)
                if self._idle_bytes > HEAD_BYTES:
                    raise Refusal(431, f"the head has more than {HEAD_BYTES} bytes")
            except httptools.HttpParserUpgrade as offer:
                # It is not taken: RFC 9110, section 7.8.
                end = at + offer.args[0]
                if self._in_body:
                    self.parser = self._parser_of_body()
            except httptools.HttpParserError as error:
                found = error.__context__ or error
                self._refuse(found if isinstance(found, Refusal) else no_http(found))
            except Refusal as refusal:
                self._refuse(refusal)
            at = end
        self._unparsed = data[at:] if not self.transport.is_closing() else b""
        if self._unparsed:
            self.flow.hold()

    def _parser_of_body(self) -> httptools.HttpRequestParser:
        """Return a parser for the body of a request that offers an upgrade, as Java's client does.

        httptools ends such a request with its head. What follows the last chunk in the same step is
        lost in this parser, so that a connection with a chunked one is closed after its answer.
        """
        events = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        parser = httptools.HttpRequestParser(events)
        length = b"Content-Length: %d" % self._body_left
        parser.feed_data(
            b"POST / HTTP/1.1\r\n%s\r\n\r\n"
            % (b"Transfer-Encoding: chunked" if self._chunked else length)
        )
        return parser

    def _may_parse(self) -> bool:
        if self.transport.is_closing() or self.pipeline or self.flow.write_paused:
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _end_of_step(self, data: bytes, at: int) -> int:
        """Return up to where bytes can be parsed without beginning a second request."""
        if not self._in_body:
            if data[at] == 13 and not self._in_head:  # line breaks may stand before a head
                at = len(data) - len(data[at:].lstrip(b"\r\n"))
            found = data.find(b"\r\n\r\n", at)
            return found + 4 if found >= 0 else len(data)
        step = CHUNKED_STEP_BYTES if self._chunked else self._body_left
        return min(len(data), at + step)

    def _read_on(self) -> None:
        """Parse what was held back, and read again where none of it is left."""
        if self._lingers or self._raw.is_closing():
            return
        if self._unparsed:
            unparsed, self._unparsed = self._unparsed, b""
            self._parse(unparsed)
        if not self._unparsed and not self._lingers:
            self.flow.release()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what is no request, and close."""
        body = json.dumps({"error": str(refusal)}).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        if not self.transport.is_closing():
            self.transport.write(STATUS_LINE[refusal.status] + head % len(body) + body)
            self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _become_idle(self) -> None:
        """Wait for the client: for the rest of a body that is not read any more, or a request."""
        self._waiting.add(self)
        if self.flow.write_paused:
            return  # for its answer to be read
        if self._in_body:
            self._within(DISCARD_SECONDS, self._raw.abort)
        elif self._in_head:
            self._within(HEAD_SECONDS, self._raw.abort)
        else:
            self._within(None)

    def _close_if_idle(self) -> None:
        if self._is_idle():
            self.transport.close()

    def _discard(self, count: int, most: int) -> None:
        self._discarded_bytes += count
        if self._discarded_bytes > most:
            self._raw.abort()

    def _linger(self) -> None:
        """Read on, as the sending half is closed, until the client closes its half."""
        self._lingers = True
        self._unparsed, self._discarded_bytes = b"", 0
        self._unset_keepalive_if_required()
        self._waiting.add(self)
        self.flow.resume_reading()
        self.flow.release()
        self._within(LINGER_SECONDS, self._end_lingering)

    def _end_lingering(self) -> None:
        if left := self._raw.get_write_buffer_size():
            self._expect_progress(left, self._end_lingering)
        else:
            self._raw.close()

    def _expect_progress(self, left: int, then: Callable[[], None]) -> None:
        """Give up where the client has read nothing of so many bytes some seconds later."""

        def look() -> None:
            now = self._raw.get_write_buffer_size()
            if now >= left:
                self._raw.abort()
            elif now:
                self._expect_progress(now, then)
            else:
                then()

        self._within(STALL_SECONDS, look)

    def _within(self, seconds: float | None, then: Callable[[], None] | None = None) -> None:
        """Set the one deadline of what is waited for, instead of the one before."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None and then is not None:
            self._deadline = self.loop.call_later(seconds, then)


class Reader(asyncio.BufferedProtocol):
    """Reads a connection in parts of a size that it chooses; uvloop itself reads 256 KiB at once.

    uvloop takes no class for it that is an ``asyncio.Protocol`` too, as uvicorn's are.
    """

    _buffer = memoryview(bytearray(BODY_READ_BYTES))
    """Of all connections: what was read is copied before another one is read."""
    _usual = _buffer[:READ_BYTES]

    def __init__(self, **options: Any) -> None:
        """Make the connection, as uvicorn would."""
        self._connection = connection = BoundedConnection(**options)
        self.connection_made = connection.connection_made  # type: ignore[method-assign]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes are to be put."""
        size = self._connection.bytes_to_read()
        return self._usual if size == READ_BYTES else self._buffer[:size]

    def buffer_updated(self, nbytes: int) -> None:
        """Give the connection what was put there."""
        self._connection.data_received(bytes(self._buffer[:nbytes]))


def no_http(error: BaseException) -> Refusal:
    """Return the answer to what the parser cannot read."""
    return Refusal(400, f"this is no HTTP/1.1 request: {str(error)[:120]}")
