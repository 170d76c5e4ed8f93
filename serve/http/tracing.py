"""OpenTelemetry spans of inference requests, sent to a collector by OTLP over HTTP."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from compress.serve.http.messages import Headers


class Tracing:
    """Sends a span for each request, as a child of the one that its `traceparent` names."""

    def __init__(self, url: str) -> None:
        """Create the exporter's thread; OpenTelemetry's own variables (`OTEL_…`) hold, too."""
        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "compress")}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("compress.serve")

    def record(
        self, name: str, version: str, headers: Headers, status: int, seconds: float
    ) -> None:
        """Record a request to a version of a model that has ended now."""
        end = time.time_ns()
        span = self._tracer.start_span(
            f"infer {name}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            start_time=end - int(seconds * 1e9),
            attributes={
                "model.name": name,
                "model.version": version,
                "http.response.status_code": status,
            },
        )
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()
