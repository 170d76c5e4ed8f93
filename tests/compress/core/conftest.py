"""Fixtures of the tests of gates and metrics."""

import math
from collections.abc import Iterator

import pytest

from compress.profiling import quantiles
from compress.profiling.benchmark import compare_latencies


@pytest.fixture(autouse=True)
def measure_briefly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measure latency for a millisecond, and accept intervals of any width."""
    monkeypatch.setattr(compare_latencies, "__defaults__", (0.001,))
    monkeypatch.setattr(quantiles, "WIDEST", math.inf)
    yield
