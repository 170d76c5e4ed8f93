"""A process with limits of time and memory for tokenizers, chat templates and images.

They may take any time and memory, in native code that no signal interrupts. The process is a fork
of one which has loaded the files and reads no request: another fork takes a few milliseconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from compress.common.errors import ArtifactInvalid, CompressError
from compress.common.process import end_with_parent, start_module
from compress.serve.http.messages import HttpError
from compress.serve.worker.tensors import TOO_LARGE

MIB = 2**20
LOAD_SECONDS, LOAD_MIB = 60.0, 2048
"""Limits for loading the files: the tokenizers of the largest vocabularies take some seconds and
hundreds of MiB."""
SMALL_BYTES = 64 * 1024  # larger bodies wait for each other first: small ones wait for one at most
CALLS_PER_LIMIT = 3  # so many calls fit into the time limit of a request: others wait meanwhile
BASE_MIB = 8  # memory that a call may take in addition to what the largest right request needs
READING, WRITING = "r", "w"  # lanes, of one letter: answers never wait for requests
LANES = {READING: ("request", "read"), WRITING: ("answer", "written as text")}
FRAME = struct.Struct("<QQ")  # sizes of a message's pickled part, and of the body behind it


class HelperProcess:
    """Calls methods of an object that another process has created, by pickled values.

    It has a fork for each lane, which answers one call at a time. Both processes run this code.
    """

    def __init__(
        self, create: Callable[..., Any], *args: Any, what: Path, seconds: float, needed_bytes: int
    ) -> None:
        """Start the process, and wait until it has called `create(*args)`, a function of a module.

        `what` is the artifact, for messages; `seconds` the time limit of a request, of which a call
        has a third, as others wait meanwhile; `needed_bytes` the memory that the call of the
        largest right request takes. ArtifactInvalid if nothing is created within LOAD_SECONDS and
        LOAD_MIB, else what `create` raises.
        """
        self._mebibytes = BASE_MIB + needed_bytes // MIB
        self._start_message = pickle.dumps((create, args, self._mebibytes))
        self._what, self._seconds = what, seconds / CALLS_PER_LIMIT
        self._large = asyncio.Lock()
        self._turns = {lane: asyncio.Lock() for lane in LANES}
        self._sockets: dict[str, socket.socket] = {}
        """By lane, to its fork; none where it is yet to be forked."""
        self._used: set[str] = set()
        self._restart: asyncio.Future[None] | None = None
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        # A backtrace takes memory, of which there is none, and then waits for ever.
        settings = {"RUST_BACKTRACE": "0", "RUST_LIB_BACKTRACE": "0"}
        # One thread: the stacks of others count as memory.
        settings |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            self._process = start_module(__name__, theirs, **settings)
        self._control.settimeout(LOAD_SECONDS)
        try:
            _send(self._control, self._start_message)
            succeeded, value = pickle.loads(_receive(self._control)[0])
        except (OSError, EOFError):
            self._end()
            raise ArtifactInvalid(
                f"{self._what}: its tokenizer, chat template or image settings were not loaded "
                f"within {LOAD_SECONDS:g} s and {LOAD_MIB} MiB"
            ) from None
        if not succeeded:
            self._end()
            raise value
        self._control.settimeout(None)

    def _end(self) -> None:
        self._process.kill()  # it has no call in progress; its forks end with it
        self._process.wait()
        self._control.close()

    def close(self) -> None:
        """End the processes."""
        self._end()
        for each in self._sockets.values():
            each.close()

    async def call(
        self, method: str, *args: Any, body: bytes | bytearray | None = None, lane: str = READING
    ) -> Any:
        """Return what a method returns for some values and, behind them, a body.

        Calls of one lane wait for each other. HttpError as the method raises it; or it took too
        long (504) or too much memory (413), or the process could not be started again (503).
        """
        content = body or b""
        large = self._large if len(content) > SMALL_BYTES else nullcontext()
        message = pickle.dumps((method, args, body is not None))
        what, done = LANES[lane]
        async with large, self._turns[lane]:
            for attempt in (1, 2):
                connection = await self._connected(lane)
                used = lane in self._used
                self._used.add(lane)
                try:
                    async with asyncio.timeout(self._seconds):
                        succeeded, value = await _exchange(connection, message, content)
                    break
                except TimeoutError:
                    self._fork(lane)
                    late = f"the {what} was not {done} in {self._seconds:g} s"
                    raise HttpError(504, late) from None
                except (OSError, EOFError):
                    self._fork(lane)
                    # What earlier calls have left there may have been too much, too.
                    if attempt == 2 or not used:
                        found = f"the {what} takes more than {self._mebibytes} MiB to be {done}"
                        raise HttpError(TOO_LARGE, found) from None
                except asyncio.CancelledError:  # nobody waits for it
                    self._fork(lane)
                    raise
        if succeeded:
            return value
        try:
            raise value
        finally:
            del value  # its traceback refers to this frame, which refers to the body

    async def _connected(self, lane: str) -> socket.socket:
        """Return the connection to a lane's fork, after the process was started again if needed."""
        while lane not in self._sockets:
            if (restart := self._restart) is not None:
                try:
                    await asyncio.shield(restart)  # which others wait for, too
                except CompressError:
                    message = "the process that reads requests has ended, and cannot be started"
                    raise HttpError(503, f"{message} again", retry_after="10") from None
                finally:
                    if restart.done() and self._restart is restart:
                        self._restart = None
            self._fork(lane)
        return self._sockets[lane]

    def _fork(self, lane: str) -> None:
        """Let a new fork answer, and end the one before, which may be in a call."""
        if before := self._sockets.pop(lane, None):
            before.close()
        self._used.discard(lane)
        if self._restart is not None:
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._control, [lane.encode()], [theirs.fileno()])
                self._sockets[lane] = ours
            except OSError:  # the kernel has ended the process, as memory was short
                ours.close()
                self._end()
                # In a thread of the event loop's, as it takes seconds. That thread lives as long as
                # the loop: the process is killed with the thread that started it.
                self._restart = asyncio.ensure_future(asyncio.to_thread(self._start))
                self._restart.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _exchange(
    connection: socket.socket, message: bytes, body: bytes | bytearray
) -> tuple[bool, Any]:
    """Send a call and return its reply: whether it succeeded, and what it returned or raised."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, FRAME.pack(len(message), len(body)) + message)
    if body:
        await loop.sock_sendall(connection, body)
    part = await loop.sock_recv(connection, SMALL_BYTES)
    if not part:
        raise EOFError
    reply = bytearray(FRAME.size + FRAME.unpack_from(part)[0])
    reply[: len(part)] = part
    view, place = memoryview(reply), len(part)
    while place < len(view):
        count = await loop.sock_recv_into(connection, view[place:])
        if not count:
            raise EOFError
        place += count
    result: tuple[bool, Any] = pickle.loads(view[FRAME.size :])
    return result


def main() -> None:
    """Load what is asked for, then fork a process that answers, whenever that is asked for."""
    end_with_parent(signal.SIGKILL)
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a terminal, or service
        signal.signal(each, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Native code writes there, without escaping what it was given, that memory is short.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _limit_memory(LOAD_MIB)
        try:
            create, args, mebibytes = pickle.loads(_receive(control)[0])
            service = create(*args)
        except Exception as error:  # noqa: BLE001 - raised by the server
            known = isinstance(error, CompressError)
            trace = RuntimeError(f"in the helper process: {traceback.format_exc()}")
            _send(control, pickle.dumps((False, error if known else trace)))
            return
        gc.collect()
        gc.freeze()  # collections would write to pages that forks share
        _send(control, pickle.dumps((True, None)))
        forks: dict[bytes, int] = {}
        while (received := socket.recv_fds(control, 1, 1))[1]:
            lane, fds, *_ = received
            if before := forks.get(lane):
                os.kill(before, signal.SIGKILL)
                os.waitpid(before, 0)
            forks[lane] = os.fork()
            if not forks[lane]:
                control.close()
                end_with_parent(signal.SIGKILL)
                _limit_memory(mebibytes)
                with suppress(OSError, EOFError, MemoryError):
                    _answer_calls(socket.socket(fileno=fds[0]), service)
                os._exit(0)
            os.close(fds[0])


def _answer_calls(connection: socket.socket, service: Any) -> None:
    while True:
        message, body = _receive(connection)
        method, args, has_body = pickle.loads(message)
        is_large = len(body) > SMALL_BYTES
        try:
            reply = True, getattr(service, method)(*args, *([body] if has_body else []))
        except HttpError as error:
            reply = False, error
        except MemoryError:  # the server learns that from the end of this process
            raise
        except Exception as error:  # noqa: BLE001 - a bug, which the server logs
            reply = False, RuntimeError(f"{type(error).__name__}: {error}")
        del message, body
        _send(connection, pickle.dumps(reply))
        if is_large:
            del args, reply
            ctypes.CDLL(None).malloc_trim(0)


def _limit_memory(mebibytes: int) -> None:
    """Let this process take so much more memory than it has."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    now = int(status.partition("VmData:")[2].split()[0]) * 1024
    limit, hard = now + mebibytes * MIB, resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard != resource.RLIM_INFINITY:  # the user's own
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(FRAME.pack(len(message), 0) + message)


def _receive(connection: socket.socket) -> tuple[bytes | bytearray, bytes | bytearray]:
    """Return a message, and the body behind it; raise EOFError where the other end is closed."""
    sizes = FRAME.unpack(_receive_exactly(connection, FRAME.size))
    message, body = (_receive_exactly(connection, size) for size in sizes)
    return message, body


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


if __name__ == "__main__":
    main()
