"""Clients that misuse the built-in server, each in a process of its own.

    python attacks.py NAME PORT

opens the connections of an attack, prints a line once they are under way, and goes on until its
standard input is closed. `under_attack` runs it and asks for the server's health meanwhile.
"""

import contextlib
import errno
import http.client
import io
import json
import resource
import select
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TOKEN = "a-token-of-the-tests"
INFER = "/v2/models/model/infer"
MIB = 2**20
CHUNK = 256 * 1024
"""Bytes of one send."""
OPENED_AT_ONCE = 200
"""Connections that are opened between two rounds of sending."""


@dataclass(frozen=True)
class Attack:
    """What each of some connections does."""

    connections: int
    first: bytes = b""
    """Sent once."""
    then: bytes = b""
    """Sent again and again, as fast as the server takes it."""
    every: float = 0.0
    """Seconds between two times, where it is not as fast as that."""
    reads: bool = False
    """Whether the answers are read."""
    opens_again: bool = True
    """Whether a connection that the server closed is opened again."""


def post(body: bytes, content_type: str = "application/json", token: str = TOKEN) -> bytes:
    """Return an inference request."""
    return head(f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n", token) + body


def head(headers: str, token: str = TOKEN) -> bytes:
    """Return the head of an inference request."""
    return (
        f"POST {INFER} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {token}\r\n{headers}\r\n"
    ).encode()


def get(path: str) -> bytes:
    """Return a GET request with the token."""
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()


def npz_of_members(count: int) -> bytes:
    """Return an uncompressed zip of empty members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for i in range(count):
            archive.writestr(f"{i}.npy", b"")
    return stream.getvalue()


def tensors(count: int) -> bytes:
    """Return a request of the protocol with many tensors."""
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0]}
    return json.dumps({"inputs": [{**tensor, "name": f"{i}"} for i in range(count)]}).encode()


def data(values: bytes) -> bytes:
    """Return a request of the protocol whose tensor holds what is given as its data."""
    start = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ['
    return start + values + b"]}]}"


SMALL = b"GET /v2/health/live HTTP/1.1\r\n\r\n"
ATTACKS = {
    "pipelined requests, no answer read": lambda: Attack(60, then=SMALL * 4000),
    "pipelined requests, answers read": lambda: Attack(60, then=SMALL * 4000, reads=True),
    "pipelined 401s": lambda: Attack(60, then=post(b"{}", token="wrong") * 2000),
    "pipelined /metrics": lambda: Attack(60, then=get("/metrics") * 2000),
    "1,100 idle connections": lambda: Attack(1100),
    "1,100 kept connections": lambda: Attack(1100, first=SMALL, reads=True),
    "10,000 idle connections": lambda: Attack(10_000, opens_again=False),
    "1,100 slow heads": lambda: Attack(1100, first=SMALL[:-2], then=b"X: x\r\n", every=1),
    "1,100 slow bodies without a token": lambda: Attack(
        1100, first=head("Content-Length: 1000000\r\n", "wrong"), then=b"x", every=1
    ),
    "an npz of 38,000 members": lambda: Attack(
        4, then=post(npz_of_members(38_000), "application/x-npz"), reads=True
    ),
    "JSON of 4 million numbers": lambda: Attack(16, then=post(data(b"0," * 4_100_000 + b"0"))),
    "JSON of 2.7 million lists": lambda: Attack(16, then=post(data(b"[]," * 2_700_000 + b"[]"))),
    "JSON of a long and many short texts": lambda: Attack(
        4, then=post(data(b'"%s"' % (b"x" * 4 * MIB) + b",1" * 100)), reads=True
    ),
    "JSON of 100,000 tensors": lambda: Attack(8, then=post(tensors(100_000)), reads=True),
    "heads of 12,000 headers": lambda: Attack(
        60, then=SMALL[:-2] + b"a:\r\n" * 12_000 + b"\r\n", reads=True
    ),
    "chunks of one byte": lambda: Attack(
        60, head("Transfer-Encoding: chunked\r\n"), b"1\r\nx\r\n" * 40_000
    ),
    "chunks with long extensions": lambda: Attack(
        60, head("Transfer-Encoding: chunked\r\n"), b"1;%s\r\nx\r\n" % (b"x" * 30_000) * 8
    ),
    "line breaks": lambda: Attack(60, then=b"\r\n" * 100_000),
    "no HTTP": lambda: Attack(60, then=b"\x16\x03\x01" + bytes(100_000)),
}


class Attacker:
    """Connections of one attack, driven by one thread."""

    def __init__(self, attack: Attack, port: int) -> None:
        self.attack, self.port = attack, port
        self.epoll = select.epoll()
        self.sockets: dict[int, socket.socket] = {}
        self.unsent: dict[int, memoryview] = {}
        self.then = memoryview(attack.then)
        self.missing = attack.connections
        self.due = 0.0

    def step(self) -> None:
        """Open what is missing, and send and read what can be."""
        for _ in range(min(self.missing, OPENED_AT_ONCE)):
            self.open()
        if self.attack.every and time.monotonic() > self.due:
            self.due = time.monotonic() + self.attack.every
            for place in [*self.sockets]:
                self.unsent[place] = self.unsent.get(place) or self.then
                self.send(place)
        for place, events in self.epoll.poll(0.05):
            if events & select.EPOLLIN and self.attack.reads:
                self.read(place)
            if place in self.sockets and events & select.EPOLLOUT:
                self.send(place)
            if place in self.sockets and events & (select.EPOLLHUP | select.EPOLLERR):
                self.close(place)

    def open(self) -> None:
        each = socket.socket()
        each.setblocking(False)
        if each.connect_ex(("127.0.0.1", self.port)) not in (0, errno.EINPROGRESS):
            each.close()
            return
        self.missing -= 1
        self.sockets[each.fileno()] = each
        self.unsent[each.fileno()] = memoryview(self.attack.first)
        reading = select.EPOLLIN if self.attack.reads else select.EPOLLRDHUP
        self.epoll.register(each.fileno(), select.EPOLLOUT | reading)

    def send(self, place: int) -> None:
        left = self.unsent[place]
        if not left and self.then and not self.attack.every:
            left = self.then
        try:
            sent = self.sockets[place].send(left[:CHUNK]) if left else 0
        except BlockingIOError:
            return
        except OSError:
            self.close(place)
            return
        self.unsent[place] = left[sent:]
        if not self.unsent[place] and (self.attack.every or not self.then):
            reading = select.EPOLLIN if self.attack.reads else select.EPOLLRDHUP
            self.epoll.modify(place, reading)

    def read(self, place: int) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                if self.sockets[place].recv(CHUNK):
                    return
            except ConnectionError:
                pass
            self.close(place)

    def close(self, place: int) -> None:
        self.epoll.unregister(place)
        self.sockets.pop(place).close()
        del self.unsent[place]
        self.missing += self.attack.opens_again


def main() -> None:
    """Attack until the standard input is closed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker(ATTACKS[sys.argv[1]](), int(sys.argv[2]))
    start, announced = time.monotonic(), False
    while not select.select([sys.stdin], [], [], 0)[0]:
        attacker.step()
        if not announced and (not attacker.missing or time.monotonic() > start + 2):
            announced = True
            print("under way", flush=True)


@dataclass
class Seen:
    """What a server did while it was attacked."""

    health: list[float]
    """Seconds until each question for its health was answered; infinite where it was not."""
    kept: list[float]
    """The same of inference requests on one kept connection."""
    mib_before: float
    mib_most: float
    """Resident memory of all its processes, before and at most."""

    @property
    def grown_mib(self) -> float:
        """Memory that the attack took."""
        return self.mib_most - self.mib_before


def under_attack(name: str, port: int, pids: list[int], seconds: float) -> Seen:
    """Return what a server did during some seconds of an attack, and shortly after."""
    body = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0, 3, 1, 2]}]}'
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    seen = Seen([], [], before := mebibytes(pids), before)
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with attacking(name, port):
        ended = time.monotonic() + seconds
        while time.monotonic() < ended:
            for times, connection, request in (
                (seen.health, None, ("GET", "/v2/health/live")),
                (seen.kept, kept, ("POST", INFER, body, headers)),
            ):
                times.append(seconds_of(connection, port, request))
                seen.mib_most = max(seen.mib_most, mebibytes(pids))
            time.sleep(0.02)
    kept.close()
    return seen


@contextlib.contextmanager
def attacking(name: str, port: int) -> Iterator[None]:
    """Attack from another process."""
    command = [sys.executable, str(Path(__file__)), name, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "under way\n"
            yield
        finally:
            process.kill()


def seconds_of(connection: http.client.HTTPConnection | None, port: int, request: tuple) -> float:
    """Return how long an answer took: infinite where it was refused, or none came."""
    began = time.monotonic()
    used = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        used.request(*request)
        response = used.getresponse()
        response.read()
        return time.monotonic() - began if response.status == 200 else float("inf")
    except OSError:
        used.close()
        return float("inf")
    finally:
        if connection is None:
            used.close()


def mebibytes(pids: list[int]) -> float:
    """Return the resident memory of some processes."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    main()
