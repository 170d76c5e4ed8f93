"""Draws a share of a server's requests, and sends them to the process that compares them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric

from compress.common import errors
from compress.common.errors import StageFailed
from compress.serve.shadow.options import WRITE_SECONDS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from compress.serve.shadow.options import Asked
    from compress.serve.worker.tensors import Array

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # time to import torch and to open the model
STOP_SECONDS = 10.0  # time for the last comparison, and to write the state
QUEUE_BYTES = 16 * 2**20
"""Bytes of requests that wait to be compared; while there are as many, others are dropped."""
SHOWN = {
    "requests": "Requests answered since the comparison began",
    "compared": "Requests that the uncompressed model answered, too",
    "other": "Compared requests that were answered otherwise",
    "dropped": "Requests that were drawn and not compared, as others waited",
    "failed": "Requests that the uncompressed model could not answer",
    "limit": "Percent of other answers that are allowed",
    "lower": "Lower bound of the percent of other answers, valid at every moment",
    "upper": "Upper bound of the percent of other answers, valid at every moment",
    "evidence": "Evidence that the share was above the limit",
}


class Sampler(asyncio.Protocol):
    """Sends requests to a process of its own, without waiting, and keeps what that reports."""

    def __init__(self, asked: Asked, *, rows_stay_first: bool, joins_rows: bool) -> None:
        """Start the process, and wait until it has opened model and state; raise what it raises.

        `rows_stay_first`: whether axis 0 of the outputs counts the rows of the inputs;
        `joins_rows`: whether a row may be answered alone.
        """
        self._asked = asked
        self._rows_stay_first, self._joins_rows = rows_stay_first, joins_rows
        self._socket, theirs = socket.socketpair()
        path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "compress.serve.shadow.comparison",
                    str(theirs.fileno()),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._transport: Any = None
        self._registry: CollectorRegistry | None = None
        self._received, self._is_closed = b"", False
        self.found: dict[str, Any] = {}
        """The last report of the process."""
        try:
            self._socket.settimeout(START_SECONDS)
            self._socket.sendall(_frame(asked))
            found = json.loads(self._socket.makefile().readline() or "{}")
        except OSError:
            found = {}
        if "limit" not in found:
            self.close()
            known = getattr(errors, found.get("kind", ""), StageFailed)
            lines = found.get("lines", ["the process that compares answers did not start"])
            raise known("; ".join(lines))
        self._report(found)
        self.requests, self.dropped = found["requests"], found["dropped"]

    def start(self, labels: dict[str, str], registry: CollectorRegistry) -> None:
        """Begin to send, in the event loop, and to show what is found with these labels."""
        self._labels, self._registry = labels, registry
        registry.register(self)
        self._loop = asyncio.get_running_loop()
        connecting = self._loop.create_connection(lambda: self, sock=self._socket)
        self._connecting = self._loop.create_task(connecting)

    def connection_made(self, transport: Any) -> None:
        """Send the counts from now on, so that they are written."""
        self._transport = transport
        self._tick()

    def _tick(self) -> None:
        if self._transport is not None:
            if not self._transport.get_write_buffer_size():
                self._transport.write(_frame((self.requests, self.dropped, None)))
            self._timer = self._loop.call_later(WRITE_SECONDS, self._tick)

    def data_received(self, data: bytes) -> None:
        """Take reports of the process."""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._report(json.loads(line))

    def _report(self, found: dict[str, Any]) -> None:
        before, self.found = self.found, found
        if found["error"] and not before.get("error"):
            logger.error("shadow: a request was not compared: %s", found["error"])
        if found["broken_at"] and not before.get("broken_at"):
            logger.error(
                "certificate broken: %d of %d compared requests were answered otherwise than by "
                "the uncompressed model, and the limit is %g %% (broken at %s)",
                *(found[name] for name in ("other", "compared", "limit", "broken_at")),
            )

    def connection_lost(self, error: Exception | None) -> None:
        """Say that nothing is compared any more, unless the server is being stopped."""
        self._transport = None
        if not self._is_closed:
            logger.error(
                "shadow: the process that compares answers has ended; requests are answered, and "
                "no longer compared until the server is started again"
            )

    def observe(self, arrays: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Count a request that was answered, and send it if it is drawn; in the event loop."""
        self.requests += 1
        # By a generator of its own: neither content nor load of the requests decides.
        if random.random() >= self._asked.options.share:
            return
        if self._transport is None or self._transport.get_write_buffer_size() > QUEUE_BYTES:
            self.dropped += 1
            return
        # One row of a request: its rows are often alike, and are no independent samples.
        row = random.randrange(len(arrays[0])) if self._rows_stay_first else None
        if row is not None and self._joins_rows:
            arrays, outputs = ([each[row : row + 1] for each in some] for some in (arrays, outputs))
            row = 0
        self._transport.write(_frame((self.requests, self.dropped, (arrays, outputs, row))))

    @property
    def refuses(self) -> bool:
        """Whether the server must not be ready: its limit is broken, and that was asked for."""
        return self._asked.options.decides_readiness and bool(self.found["broken_at"])

    def collect(self) -> Iterator[Metric]:
        """Yield what is known, for Prometheus."""
        live = {"requests": self.requests, "dropped": self.dropped}
        found, is_broken = self.found | live, bool(self.found["broken_at"])
        shown = [(f"shadow_{name}", text, found[name]) for name, text in SHOWN.items()]
        shown += [
            ("shadow_up", "Whether requests are compared", int(self._transport is not None)),
            ("certificate_broken", "Whether the limit is broken", int(is_broken)),
        ]
        for name, text, value in shown:
            metric = Metric(f"compress_{name}", text, "gauge")
            metric.add_sample(metric.name, self._labels, value)
            yield metric

    def close(self) -> None:
        """Let the process write its state and end."""
        self._is_closed = True
        if self._registry is not None:
            self._registry.unregister(self)
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _frame(content: Any) -> bytes:
    """Return a message as `multiprocessing.connection.Connection` reads it."""
    message = pickle.dumps(content, protocol=5)
    return struct.pack("!i", len(message)) + message
