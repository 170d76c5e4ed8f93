"""What all tests of pruning share."""

import math
from collections.abc import Iterator

import pytest

from compress.profiling import quantiles
from compress.pruning import channel_pruner


@pytest.fixture(scope="session", autouse=True)
def few_calls() -> Iterator[None]:
    """Measure a pruned model with the fewest calls: half a second is as long as most cuts take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_pruner, "MEASURED_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True)
def few_calls_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the figures of so few calls for sure; not for the session, whose other tests judge."""
    monkeypatch.setattr(quantiles, "WIDEST", math.inf)
