"""Draws a share of a server's requests, and sends them to the process that compares them."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import random
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric

from compress.common import errors
from compress.common.errors import StageFailed
from compress.common.process import start_module
from compress.serve.shadow.options import WRITE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from prometheus_client import CollectorRegistry

    from compress.common.signature import Signature
    from compress.serve.shadow.options import ShadowOptions
    from compress.serve.worker.tensors import Array

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # time to import torch and to open the model
STOP_SECONDS = 10.0  # time for the comparisons that wait, and to write the state
QUEUE_BYTES = 16 * 2**20
"""Bytes of requests that wait to be compared; while there are as many, others are dropped."""
METRICS = {
    "shadow_requests": "Requests answered since the comparison began",
    "shadow_compared": "Requests that the uncompressed model answered, too",
    "shadow_other": "Compared requests that were answered otherwise",
    "shadow_dropped": "Requests that were drawn and not compared, as others waited",
    "shadow_failed": "Requests that the uncompressed model could not answer",
    "shadow_limit": "Percent of other answers that are allowed",
    "shadow_lower": "Lower bound of the percent of other answers, valid at every moment",
    "shadow_upper": "Upper bound of the percent of other answers, valid at every moment",
    "shadow_evidence": "Evidence that the share was above the limit",
    "shadow_up": "Whether requests are compared",
    "certificate_broken": "Whether the evidence has sufficed",
}


class Sampler(asyncio.Protocol):
    """Sends requests to a process of its own, without waiting, and keeps what that reports."""

    def __init__(
        self, options: ShadowOptions, report: Path | None, digest: str, signature: Signature
    ) -> None:
        """Start the process, and wait until it has opened model and state; raise what it raises.

        `digest` and `signature` are those of the artifact that answers, `report` of its run.
        """
        self._options = options
        self._transport: Any = None
        self._registry: CollectorRegistry | None = None
        self._received, self._is_closed = b"", False
        self._found: dict[str, Any] = {}
        """The last report of the process."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_module(
                "compress.serve.shadow.comparison", theirs, OMP_NUM_THREADS="1"
            )
        found = {"kind": "", "message": "the process that compares answers did not start"}
        with suppress(OSError, ValueError):
            self._socket.settimeout(START_SECONDS)
            self._send_to(self._socket.sendall, (options, report, digest, signature))
            found = json.loads(self._socket.makefile().readline())
        if "kind" in found:
            self.close()
            raise getattr(errors, found["kind"], StageFailed)(found["message"])
        self._take(found)
        self.requests, self.dropped = self._found["requests"], self._found["dropped"]

    @staticmethod
    def _send_to(write: Any, content: Any) -> None:
        # As `multiprocessing.connection.Connection` reads it.
        message = pickle.dumps(content, protocol=5)
        write(struct.pack("!i", len(message)) + message)

    def start(
        self,
        labels: dict[str, str],
        registry: CollectorRegistry,
        *,
        has_rows: bool,
        joins_rows: bool,
    ) -> None:
        """Begin to send, in the event loop, and to show what is found with these labels.

        `has_rows`: whether axis 0 of the outputs counts the rows of the inputs; `joins_rows`:
        whether a row may be answered alone.
        """
        self._labels, self._registry = labels, registry
        self._has_rows, self._joins_rows = has_rows, joins_rows
        registry.register(self)
        self._loop = asyncio.get_running_loop()
        connecting = self._loop.create_connection(lambda: self, sock=self._socket)
        self._connecting = self._loop.create_task(connecting)

    def connection_made(self, transport: Any) -> None:
        """Send the counts from now on, so that they are written."""
        self._transport = transport
        self._send_counts()

    def _send_counts(self) -> None:
        if self._transport is not None:
            if not self._transport.get_write_buffer_size():
                self._send_to(self._transport.write, (self.requests, self.dropped, None))
            self._loop.call_later(WRITE_SECONDS, self._send_counts)

    def data_received(self, data: bytes) -> None:
        """Take reports of the process."""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, found: dict[str, Any]) -> None:
        before, self._found = self._found, found
        if found["error"] and not before.get("error"):
            logger.error("shadow: a request was not compared: %s", found["error"])
        if found["broken_at"] and not before.get("broken_at"):
            logger.error(
                "certificate broken at %s: of %d compared requests %d are answered otherwise than "
                "by the uncompressed model, and the limit is %g %%",
                *(found[name] for name in ("broken_at", "compared", "other", "limit")),
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
        if random.random() >= self._options.share:
            return
        if self._transport is None or self._transport.get_write_buffer_size() > QUEUE_BYTES:
            self.dropped += 1
            return
        # One row of a request: its rows are often alike, and are no independent samples.
        row = random.randrange(len(arrays[0])) if self._has_rows else None
        if row is not None and self._joins_rows:
            arrays, outputs = ([each[row : row + 1] for each in some] for some in (arrays, outputs))
            row = 0
        drawn = arrays, outputs, row
        self._send_to(self._transport.write, (self.requests, self.dropped, drawn))

    @property
    def refuses(self) -> bool:
        """Whether the server must not be ready: its limit is broken, and that was asked for."""
        return self._options.decides_readiness and bool(self._found["broken_at"])

    def collect(self) -> Iterator[Metric]:
        """Yield what is known, for Prometheus."""
        live = {"requests": self.requests, "dropped": self.dropped, "up": bool(self._transport)}
        found = self._found | live | {"certificate_broken": bool(self._found["broken_at"])}
        for name, text in METRICS.items():
            metric = Metric(f"compress_{name}", text, "gauge")
            metric.add_sample(metric.name, self._labels, float(found[name.removeprefix("shadow_")]))
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
