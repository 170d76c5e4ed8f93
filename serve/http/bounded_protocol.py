"""uvicorn's HTTP/1.1 connection, with bounds on what one client can make the server hold or do.

uvicorn's httptools protocol parses everything that it reads at once, and resumes reading whenever
one of the parsed requests was answered: a client that pipelines small requests without reading the
responses makes it hold any number of them. Here a connection has one request in progress; the rest
stays in the kernel's socket buffer, so that TCP flow control slows the client down.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from compress.serve.http.messages import HttpError, Response, response_bytes, run_unchunked
from compress.serve.worker.tensors import UNREADABLE

if TYPE_CHECKING:
    from compress.serve.http.inference import WholeRequest

HEAD_SECONDS = 10.0  # time limit for a request's head, and for the silence of a new connection
HEAD_BYTES = 64 * 1024
"""Largest request head; also the most bytes between two parts of a chunked body (chunk extensions)
and after its last one (trailers)."""
HEADERS = 128
READ_BYTES = 4 * 1024  # of one read, except within a body of known length, which is cheap to parse
BODY_READ_BYTES = 64 * 1024
CHUNKED_STEP_BYTES = 1024
"""Bytes of a chunked body that are parsed at once. Where it ends is known only after parsing, so
that small requests behind it in the same step are parsed too: 56 of them at most fit in here."""
STALL_SECONDS = 10.0  # a client that reads nothing of its response for so long is disconnected
LINGER_SECONDS = 2.0
LINGERING_BYTES = 1024**2  # still read after a connection's last response; see `LingeringTransport`
DISCARDED_BYTES = 64 * 1024**2
"""The body of a refused request is read and discarded up to this size: many clients read no
response before they have sent everything."""
DISCARD_SECONDS = 30.0
DRAIN_SECONDS = 1.0  # how long a shutdown keeps an idle connection: a request may be in flight
CONNECTIONS = 1024  # above this, those that have waited longest for their clients are closed
MAX_CONNECTIONS = 4096  # above this, even if they have waited less than GRACE_SECONDS
GRACE_SECONDS = 1.0
"""Time for a new connection to send its request: many are accepted at once, and the one with a
request may be the first of them."""
OF_CONNECTION = "connection"  # pause of reading beside uvicorn's own
OTHER_FILES = 128  # file descriptors reserved for everything but connections


class HoldableFlowControl(FlowControl):
    """Reads only while neither uvicorn (application behind on a body) nor the connection pauses."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._paused_by: set[str] = set()

    def pause_reading(self, by: str = "uvicorn") -> None:
        """Pause on behalf of uvicorn or of the connection."""
        self._paused_by.add(by)
        super().pause_reading()

    def resume_reading(self, by: str = "uvicorn") -> None:
        """Resume, unless it is paused on behalf of the other."""
        self._paused_by.discard(by)
        if not self._paused_by:
            super().resume_reading()


class Deadline:
    """The one time limit of a connection, none at first, which changes within each request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
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


class BoundedHttpProtocol(HttpToolsProtocol):
    """Reads one request at a time, each part of it with a time limit and a size limit."""

    _raw_transport: asyncio.Transport
    flow: HoldableFlowControl
    deadline: Deadline
    _whole_request: WholeRequest | None = None
    """The request in progress, if it is answered without a task."""
    _asgi_task: asyncio.Task[None] | None = None
    _running_cycle: RequestResponseCycle | None = None  # the request in progress, and its response
    _unparsed = b""  # bytes received behind the request in progress, READ_BYTES at most
    _in_head = False
    _in_body = False
    _chunked = False
    _body_bytes_left = 0
    """Bytes of the body still to come; 0 for a chunked body, whose length is unknown."""
    _overhead_bytes = 0  # bytes parsed since the head began, or since the last body data
    _discarded_bytes = 0
    _offers_upgrade = False
    _lingering = False
    _shutting_down = False

    def __init__(self, *args: Any, waiting: WaitingConnections, **options: Any) -> None:
        """Create the connection; `waiting` is the server's table, the rest as uvicorn passes it."""
        super().__init__(*args, **options)
        self._main_parser = self.parser
        self._waiting = waiting

    # Callbacks of asyncio's transport

    def connection_made(self, transport: Any) -> None:
        """Wait at most HEAD_SECONDS for the first request."""
        super().connection_made(transport)
        self._raw_transport = transport
        lingering = LingeringTransport(transport, self._start_lingering)
        self.transport = lingering  # type: ignore[assignment]
        self.flow = HoldableFlowControl(transport)
        self.deadline = Deadline(self.loop)
        self.deadline.set(HEAD_SECONDS, self._raw_transport.abort)
        self._waiting.add(self)
        self._waiting.make_room(len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request in progress: nobody waits for its response."""
        self.deadline.close()
        self._waiting.discard(self)
        self._unparsed = b""
        # Break the reference cycle: the parser refers to this connection.
        self._main_parser = None  # type: ignore[assignment]
        self.pipeline.clear()
        super().connection_lost(exc)
        if self._asgi_task is not None and self._running_cycle is not None:
            self._running_cycle.disconnected = True
            self._asgi_task.cancel()
        if self._whole_request is not None:
            self._whole_request.cancel()
            self._whole_request = None

    def read_size(self) -> int:
        """Return how many bytes may be read at once."""
        known = self._body_bytes_left if self._in_body else 0
        return max(READ_BYTES, min(known, BODY_READ_BYTES))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, then let other connections have their turn."""
        if self._lingering:
            self._count_discarded(len(data), LINGERING_BYTES)
            return
        if self._in_body and self.cycle.response_complete:
            self._count_discarded(len(data), DISCARDED_BYTES)
        self._parse(data)
        if len(data) == READ_BYTES and not self._unparsed and not self._body_bytes_left:
            # The loop would read up to 32 times in a row: cheap for bodies, not for many heads.
            self.flow.pause_reading(OF_CONNECTION)
            self.loop.call_soon(self._resume_parsing)

    def pause_writing(self) -> None:
        """Wait for the client to read its response, as long as it makes progress."""
        super().pause_writing()
        self._waiting.add(self)
        if not self._lingering:
            unsent = self._raw_transport.get_write_buffer_size()
            self._require_write_progress(unsent, self._resume_parsing)

    def resume_writing(self) -> None:
        """Continue with bytes that were left unparsed meanwhile."""
        super().resume_writing()
        if self._lingering:
            return
        self.deadline.cancel()
        if self._is_idle():
            self._wait_for_client()
        else:
            self._waiting.discard(self)
        self._resume_parsing()

    # Callbacks of httptools' parser

    def on_message_begin(self) -> None:
        """Start the time limit of a request's head."""
        super().on_message_begin()
        self._in_head, self._body_bytes_left, self._chunked = True, 0, False
        if self._is_idle():
            self.deadline.set(HEAD_SECONDS, self._raw_transport.abort)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header field; ignore trailers, which are not headers of the request."""
        if self._in_body:
            return
        value = value.strip(b" \t")  # RFC 9110, section 5.5; httptools leaves blanks behind it
        super().on_header(name, value)
        if len(self.headers) > HEADERS:
            raise HttpError(431, f"the request has more than {HEADERS} headers")
        name = self.headers[-1][0]
        if name == b"content-length":
            self._body_bytes_left = int(value)
        elif name == b"transfer-encoding":
            self._chunked = True
            if value.lower() != b"chunked":
                found = value.decode("latin-1")[:40]
                raise HttpError(UNREADABLE, f"Transfer-Encoding is {found!r}, expected chunked")

    def on_headers_complete(self) -> None:
        """Start the ASGI application, which has a time limit of its own."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise HttpError(UNREADABLE, f"the request is HTTP/{version}, expected HTTP/1.1")
        self.deadline.cancel()
        self._waiting.discard(self)
        self._in_head, self._in_body = False, True
        self._overhead_bytes = self._discarded_bytes = 0
        super().on_headers_complete()
        self._offers_upgrade = self.parser.should_upgrade()
        # See _parser_for_body: bytes behind such a body may be lost.
        end_is_unclear = self._offers_upgrade and self._chunked
        if self._shutting_down or self._body_bytes_left > DISCARDED_BYTES or end_is_unclear:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Pass body data on; the application limits its size."""
        self._overhead_bytes = 0
        self._body_bytes_left = max(0, self._body_bytes_left - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Get ready for the next request."""
        if self._offers_upgrade:
            self._offers_upgrade = False
            if self._body_bytes_left or self._chunked:
                return  # httptools takes the body for the other protocol
        self.parser = self._main_parser
        self._in_body = False
        super().on_message_complete()
        if self.cycle.response_complete:  # it was refused before its body was received
            self._wait_for_client()
        elif self._whole_request is not None:
            self._whole_request.run(bytes(self.cycle.body))  # its deadline is that of the answer

    # Callbacks of uvicorn

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application as uvicorn does; remember its task so that it can be cancelled."""
        if cycle is self.cycle and cycle.more_body:
            application: Any = self.app
            request = application.accept_whole(cycle.scope, partial(self._respond, cycle))
            if request is not None:  # a small one, which waits for its body without a task
                self._whole_request = request
                self.deadline.set(request.seconds, request.expire)
                return
        if cycle.scope["http_version"] == "1.0":
            app = partial(run_unchunked, app, cycle)
        self._running_cycle = cycle
        self._asgi_task = self.loop.create_task(cycle.run_asgi(app))
        self._asgi_task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._asgi_task)

    def on_response_complete(self) -> None:
        """Continue with the next request, or wait for it."""
        self._asgi_task = self._running_cycle = self._whole_request = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self._is_idle():
            self._wait_for_client()
        self._resume_parsing()

    def shutdown(self) -> None:
        """Close after the response in progress; an idle connection, after DRAIN_SECONDS."""
        self._shutting_down = True
        if not self._is_idle():
            self.cycle.keep_alive = False
            return

        def close_if_idle() -> None:
            if self._is_idle():
                self.transport.close()

        self.loop.call_later(DRAIN_SECONDS, close_if_idle)

    def _respond(self, cycle: RequestResponseCycle, response: Response) -> None:
        """Send the response of a request that is answered without a task."""
        if cycle.disconnected or self.transport.is_closing():
            return
        if response.headers.get("connection") == "close":
            cycle.keep_alive = False
        cycle.response_started = cycle.response_complete = True
        defaults = self.server_state.default_headers
        self.transport.write(response_bytes(response, defaults, keep_alive=cycle.keep_alive))
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    # Bounds

    def close_now(self) -> None:
        """Close a connection that waits for its client, without lingering."""
        self.connections.discard(self)
        if self._raw_transport.get_write_buffer_size():
            self._raw_transport.abort()
        else:
            self._raw_transport.close()

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of one request; keep the rest until its response is sent."""
        start = 0
        while start < len(data):
            if self.transport.is_closing() or self.pipeline or self.flow.write_paused:
                break
            if not self._is_idle() and not self.cycle.more_body:
                break  # the request in progress is complete: the next one waits for its response
            end = self._end_of_slice(data, start)
            self._overhead_bytes += end - start
            try:
                self.parser.feed_data(data[start:end])
                if self._overhead_bytes > HEAD_BYTES:
                    raise HttpError(431, f"the head has more than {HEAD_BYTES} bytes")
            except httptools.HttpParserUpgrade as upgrade:
                # A server may ignore an offered upgrade: RFC 9110, section 7.8.
                end = start + upgrade.args[0]
                if self._in_body:
                    self.parser = self._parser_for_body()
            except httptools.HttpParserError as error:
                cause = error.__context__ or error  # httptools wraps what a callback raises
                if not isinstance(cause, HttpError):
                    message = f"this is not an HTTP/1.1 request: {str(cause)[:120]}"
                    cause = HttpError(UNREADABLE, message)
                self._refuse(cause)
            except HttpError as error:
                self._refuse(error)
            start = end
        self._unparsed = data[start:] if not self.transport.is_closing() else b""
        if self._unparsed:
            self.flow.pause_reading(OF_CONNECTION)

    def _end_of_slice(self, data: bytes, start: int) -> int:
        """Return how far bytes can be parsed without starting a second request."""
        if self._in_body:
            step = CHUNKED_STEP_BYTES if self._chunked else self._body_bytes_left
            return min(len(data), start + step)
        if data[start] == ord("\r") and not self._in_head:  # line breaks may precede a head
            start = len(data) - len(data[start:].lstrip(b"\r\n"))
        blank_line = data.find(b"\r\n\r\n", start)
        return blank_line + 4 if blank_line >= 0 else len(data)

    def _parser_for_body(self) -> httptools.HttpRequestParser:
        """Return a parser for the body of a request that offers an upgrade (as Java's does)."""
        # httptools ends such a request with its head. Bytes behind the last chunk in the same slice
        # are lost in this parser, so that a connection with a chunked body is closed after its
        # response.
        events = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        parser = httptools.HttpRequestParser(events)
        length = b"Content-Length: %d" % self._body_bytes_left
        parser.feed_data(
            b"POST / HTTP/1.1\r\n%s\r\n\r\n"
            % (b"Transfer-Encoding: chunked" if self._chunked else length)
        )
        return parser

    def _resume_parsing(self) -> None:
        """Parse bytes received earlier, and read from the socket again once none are left."""
        if self._lingering or self._raw_transport.is_closing():
            return
        if self._unparsed:
            unparsed, self._unparsed = self._unparsed, b""
            self._parse(unparsed)
        if not self._unparsed and not self._lingering:
            self.flow.resume_reading(OF_CONNECTION)

    def _refuse(self, error: HttpError) -> None:
        """Answer malformed or oversized HTTP with an error, and close the connection."""
        if not self.transport.is_closing():
            application: Any = self.app
            response = application.error_response(error)
            defaults = self.server_state.default_headers
            self.transport.write(response_bytes(response, defaults, keep_alive=False))
            self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_client(self) -> None:
        """Wait for the rest of a discarded body, for the rest of a head, or for a request."""
        self._waiting.add(self)
        if self.flow.write_paused:
            return  # pause_writing has set the deadline: the client has yet to read its response
        if self._in_body:
            self.deadline.set(DISCARD_SECONDS, self._raw_transport.abort)
        elif self._in_head:
            self.deadline.set(HEAD_SECONDS, self._raw_transport.abort)
        else:
            self.deadline.set(self.timeout_keep_alive, self.close_now)

    def _count_discarded(self, count: int, limit: int) -> None:
        self._discarded_bytes += count
        if self._discarded_bytes > limit:
            self._raw_transport.abort()

    def _start_lingering(self) -> None:
        """Read and discard, after the sending half is closed, until the client closes its half."""
        self._lingering = True
        self._unparsed, self._discarded_bytes = b"", 0
        self._waiting.add(self)
        self.flow.resume_reading()
        self.flow.resume_reading(OF_CONNECTION)
        self.deadline.set(LINGER_SECONDS, self._finish_lingering)

    def _finish_lingering(self) -> None:
        """Close the socket once the client has read everything."""
        if unsent := self._raw_transport.get_write_buffer_size():
            self._require_write_progress(unsent, self._finish_lingering)
        else:
            self._raw_transport.close()

    def _require_write_progress(self, unsent: int, on_drained: Callable[[], None]) -> None:
        """Abort if none of the unsent bytes are read for STALL_SECONDS; call back once all are."""

        def check_progress() -> None:
            now_unsent = self._raw_transport.get_write_buffer_size()
            if now_unsent >= unsent:
                self._raw_transport.abort()
            elif now_unsent:
                self._require_write_progress(now_unsent, on_drained)
            else:
                on_drained()

        self.deadline.set(STALL_SECONDS, check_progress)


class BufferedHttpProtocol(asyncio.BufferedProtocol):
    """Reads a connection in parts of a chosen size; uvloop's default is 256 KiB at once."""

    # It delegates, as uvloop ignores the buffered interface of a class that is an asyncio.Protocol
    # too, which uvicorn's are.

    _buffer = memoryview(bytearray(BODY_READ_BYTES))
    """Shared by all connections: what was read is copied before another one is read."""
    _head_buffer = _buffer[:READ_BYTES]

    def __init__(self, **options: Any) -> None:
        self._connection = connection = BoundedHttpProtocol(**options)
        self.connection_made = connection.connection_made  # type: ignore[method-assign]
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next read."""
        size = self._connection.read_size()
        return self._head_buffer if size == READ_BYTES else self._buffer[:size]

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on the bytes that were read."""
        self._connection.data_received(bytes(self._buffer[:nbytes]))


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
        self._waiting_since: dict[BoundedHttpProtocol, float] = {}

    def add(self, connection: BoundedHttpProtocol) -> None:
        """Add a connection that waits from now on, or restart its waiting time."""
        self._waiting_since.pop(connection, None)
        self._waiting_since[connection] = time.monotonic()

    def discard(self, connection: BoundedHttpProtocol) -> None:
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
