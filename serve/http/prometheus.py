"""Prometheus metrics of the built-in server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from compress.serve.http.multiprocess import METRICS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Upper limits of the latency histogram, seconds; 30 is the default time limit of a request."""


class Metrics:
    """Counters of one process, or of all processes of a server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str, depth: Callable[[], float]) -> None:
        """Register every metric; `depth` counts the requests that wait or are being answered."""
        self._registry = CollectorRegistry()
        self._model = model
        self._by_status: dict[int, Counter] = {}
        # With several processes, a scrape reaches one of them, which answers with all their sums.
        self._all_processes = METRICS_VARIABLE in os.environ
        if self._all_processes:
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        else:
            ProcessCollector(registry=self._registry)
        registry = None if self._all_processes else self._registry
        self._requests = Counter(
            "inference_requests",
            "Inference requests, by HTTP status",
            ["model", "status"],
            registry=registry,
        )
        latency = Histogram(
            "inference_request_seconds",
            "Seconds from a request's head to its answer",
            ["model"],
            buckets=BUCKETS,
            registry=registry,
        )
        rows = Counter("inference_rows", "Rows answered", ["model"], registry=registry)
        queue = Gauge(
            "inference_queue_length",
            "Requests that wait or are being answered",
            ["model"],
            multiprocess_mode="livesum",
            registry=registry,
        )
        self._latency, self._rows = latency.labels(model), rows.labels(model)
        self._queue, self._depth = queue.labels(model), depth
        if not self._all_processes:
            self._queue.set_function(depth)

    def add_token_counter(self) -> None:
        """Register the tokens of a decoder's requests."""
        self._tokens = Counter(
            "inference_tokens",
            "Tokens of prompts that were answered, and of the answers",
            ["model", "part"],
            registry=None if self._all_processes else self._registry,
        )

    def count_tokens(self, prompt: int, answer: int) -> None:
        """Count the tokens of an answered request."""
        self._tokens.labels(self._model, "prompt").inc(prompt)
        self._tokens.labels(self._model, "answer").inc(answer)

    def count(self, status: int, rows: int, seconds: float) -> None:
        """Count an inference request."""
        if status not in self._by_status:  # looking up a label takes longer than counting
            self._by_status[status] = self._requests.labels(self._model, str(status))
        self._by_status[status].inc()
        self._latency.observe(seconds)
        if status == 200:
            self._rows.inc(rows)
        if self._all_processes:
            self._queue.set(self._depth())

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
