"""Draws a share of a server's requests, and sends them to the process that looks at them again."""

from __future__ import annotations

import json
import logging
import pickle
import random
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Metric

from compress.common import errors
from compress.common.errors import StageFailed
from compress.common.process import start_module

if TYPE_CHECKING:
    from pathlib import Path

    from compress.common.signature import Signature
    from compress.serve.shadow.options import ShadowOptions
    from compress.serve.worker.tensors import Array

logger = logging.getLogger(__name__)

START_SECONDS = 300.0  # time to import torch, and to export and open the model
STOP_SECONDS = 10.0  # time for the requests that wait, and to write the state
QUEUE_BYTES = 16 * 2**20  # of requests that wait; while there are as many, others are dropped
BATCH_ROWS = 64  # of one call, which takes a ninth of the time of as many alone (eager ResNet-20)
BATCH_BYTES = 2**20  # of one call, but for a single request; joining larger rows saves little
TICK_SECONDS = 0.05  # without an answered request in which the server counts as resting
WRITE_SECONDS = 1.0  # between two times that mere counts are written while the server rests
SEND_SECONDS = 10.0  # after which requests are sent although the server does not rest
GAP_SECONDS = 1.0  # for which a call that is due waits for a moment without requests in progress
LOADED_SHARE = 0.01  # of one core's time, taken at most while the server does not rest
DROP_SECONDS = 60.0  # after which a request is dropped: no alarm waits for a slow model
METRICS = {
    "shadow_requests": "Requests answered since it began",
    "shadow_compared": "Requests that were looked at again",
    "shadow_other": "Compared requests that were answered otherwise",
    "shadow_dropped": "Requests that were drawn and not looked at, as others waited",
    "shadow_failed": "Requests that could not be looked at, as a model failed",
    "shadow_limit": "Percent of other answers that are allowed",
    "shadow_lower": "Lower bound of the percent of other answers, valid at every moment",
    "shadow_upper": "Upper bound of the percent of other answers, valid at every moment",
    "shadow_evidence": "Evidence for the alarm",
    "shadow_up": "Whether requests are looked at",
    "certificate_broken": "Whether the evidence has sufficed that too many answers differ",
    "inputs_differ": "Whether the evidence has sufficed that inputs differ from the reference rows",
    "shadow_range_end": "Share of a quantized tensor's values at an end of its range",
    "shadow_range_end_reference": "The same share, of the reference rows",
}


class Sampler:
    """Sends requests to a process of its own, by a thread, and keeps what that reports."""

    def __init__(
        self, options: ShadowOptions, report: Path | None, digest: str, signature: Signature
    ) -> None:
        """Start the process, and wait until it has opened model and state; raise what it raises.

        `digest` and `signature` are those of the artifact that answers, `report` of its run.
        """
        self._options = options
        self._registry: CollectorRegistry | None = None
        self._is_up, self._closing = True, threading.Event()
        self._lock = threading.Lock()
        self._waiting, self._waiting_bytes = deque[tuple[float, bytes]](), 0
        """When each request was drawn, and its message."""
        self._found: dict[str, Any] = {}
        """The last report of the process."""
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_module(
                "compress.serve.shadow.comparison", theirs, OMP_NUM_THREADS="1"
            )
        self._reports = self._socket.makefile()
        found = {"kind": "", "message": "the process that compares answers did not start"}
        with suppress(OSError, ValueError):
            self._socket.settimeout(START_SECONDS)
            self._socket.sendall(_message((options, report, digest, signature)))
            found = json.loads(self._reports.readline())
            self._socket.settimeout(None)
        if "kind" in found:
            self.close()
            raise getattr(errors, found["kind"], StageFailed)(found["message"])
        self._take(found)
        if found["compared_with"]:  # an error, as the command shows no others
            logger.error("note: shadow: answers are compared with %s", found["compared_with"])
        self.requests, self.dropped = self._found["requests"], self._found["dropped"]

    def start(
        self,
        labels: dict[str, str],
        registry: CollectorRegistry,
        *,
        has_rows: bool,
        joins_rows: bool,
        is_busy: Callable[[], bool],
    ) -> None:
        """Begin to send, and to show what is found with these labels.

        `has_rows`: whether axis 0 of the outputs counts the rows of the inputs; `joins_rows`:
        whether a row may be answered alone; `is_busy`: whether a request is in progress.
        """
        self._labels, self._registry, self._is_busy = labels, registry, is_busy
        self._has_rows, self._joins_rows = has_rows, joins_rows
        registry.register(self)
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def observe(self, arrays: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Count a request that was answered, and keep it if it is drawn; in the event loop."""
        self.requests += 1
        # By a generator of its own: neither content nor load of the requests decides.
        if random.random() >= self._options.share:
            return
        if not self._is_up or self._waiting_bytes > QUEUE_BYTES:
            with self._lock:
                self.dropped += 1
            return
        # One row of a request: its rows are often alike, and are no independent samples.
        row = random.randrange(len(arrays[0])) if self._has_rows else None
        if row is not None and self._joins_rows:
            arrays, outputs = ([each[row : row + 1] for each in some] for some in (arrays, outputs))
            row = 0
        message = _message((arrays, outputs, row))
        with self._lock:
            self._waiting.append((time.monotonic(), message))
            self._waiting_bytes += len(message)

    def _send_all(self) -> None:
        """Send what waits whenever it is due, until the server ends; in a thread."""
        paused_until = 0.0
        try:
            while not self._closing.is_set():
                self._wait_until_due(paused_until)
                if not self._closing.is_set():
                    seconds = self._send(self._next_batch())
                    paused_until = time.monotonic() + seconds * (1 / LOADED_SHARE - 1)
            deadline = time.monotonic() + STOP_SECONDS / 2
            while (batch := self._next_batch()) and time.monotonic() < deadline:
                self._send(batch)
            self.dropped += len(batch) + len(self._waiting)
            self._send([])
        except (OSError, ValueError):  # the process has ended
            if not self._closing.is_set():
                logger.error(
                    "shadow: the process that compares answers has ended; requests are answered, "
                    "and no longer compared until the server is started again"
                )
            self._is_up = False

    def _wait_until_due(self, paused_until: float) -> None:
        """Wait for the server to rest, or until enough requests wait, or some for long."""
        began, answered, requests = time.monotonic(), self.requests, self.requests
        due_since = None
        while not self._closing.wait(TICK_SECONDS if self._waiting else WRITE_SECONDS):
            if self._process.poll() is not None:
                raise OSError("it has ended")
            now, is_busy = time.monotonic(), self._is_busy()
            rests, answered = self.requests == answered and not is_busy, self.requests
            if rests and (self._waiting or (requests < answered and now > began + WRITE_SECONDS)):
                return
            is_full = len(self._waiting) >= BATCH_ROWS or self._waiting_bytes >= BATCH_BYTES
            is_late = now > began + SEND_SECONDS and (self._waiting or requests < answered)
            if now > paused_until and (is_full or is_late):
                due_since = due_since or now
                if not is_busy or now > due_since + GAP_SECONDS:
                    return

    def _next_batch(self) -> list[bytes]:
        """Return the messages of one call, the oldest first; drop those that waited for long."""
        batch, size, oldest = list[bytes](), 0, time.monotonic() - DROP_SECONDS
        with self._lock:
            while self._waiting and len(batch) < BATCH_ROWS:
                since, message = self._waiting[0]
                if batch and size + len(message) > BATCH_BYTES:
                    break
                self._waiting.popleft()
                self._waiting_bytes -= len(message)
                if since < oldest:
                    self.dropped += 1
                    continue
                batch.append(message)
                size += len(message)
        return batch

    def _send(self, batch: Sequence[bytes]) -> float:
        """Have requests looked at, and the counts written; return the CPU seconds that took."""
        counts = (self.requests, self.dropped, self._joins_rows, len(batch))
        self._socket.sendall(b"".join((_message(counts), *batch)))
        found = json.loads(self._reports.readline())
        self._take(found)
        return float(found["seconds"])

    def _take(self, found: dict[str, Any]) -> None:
        before, self._found = self._found, found
        if found["error"] and not before.get("error"):
            logger.error("shadow: a request was not compared: %s", found["error"])
        if found["alarm"] and not before.get("alarm"):
            logger.error(found["alarm"])

    @property
    def refuses(self) -> bool:
        """Whether the server must not be ready: an alarm was raised, and that was asked for."""
        return self._options.decides_readiness and bool(self._found["alarm"])

    def collect(self) -> Iterator[Metric]:
        """Yield what is known, for Prometheus."""
        live = {"requests": self.requests, "dropped": self.dropped, "up": self._is_up}
        found = self._found | live
        for name, text in METRICS.items():
            metric = Metric(f"compress_{name}", text, "gauge")
            value = found.get(name.removeprefix("shadow_"))
            # A value for each end of a tensor's range, or one.
            for place, each in value.items() if isinstance(value, dict) else [("", value)]:
                ends = dict(zip(("tensor", "end"), place.rsplit(", ", 1), strict=False))
                if each is not None:
                    metric.add_sample(metric.name, self._labels | (ends if place else {}), each)
            if metric.samples:
                yield metric

    def close(self) -> None:
        """Let the process look at what waits, write its state and end."""
        deadline = time.monotonic() + STOP_SECONDS
        self._closing.set()
        if self._registry is not None:
            self._registry.unregister(self)
            self._thread.join(STOP_SECONDS)
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _message(content: Any) -> bytes:
    """Return a value as `multiprocessing.connection.Connection` reads it."""
    message = pickle.dumps(content, protocol=5)
    return struct.pack("!i", len(message)) + message
