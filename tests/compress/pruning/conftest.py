"""What all tests of pruning share."""

import math
from collections.abc import Iterator

import pytest

from compress.core import quantiles
from compress.pruning import pruner


@pytest.fixture(scope="session", autouse=True)
def few_calls() -> Iterator[None]:
    """Measure a pruned model with the fewest calls: half a second is as long as most cuts take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruner, "MEASURED_SECONDS", 0.0)
        patch.setattr(quantiles, "WIDEST", math.inf)
        yield
