"""How long Hypothesis looks: the same sixty examples each time, or as many as are asked for.

`make fuzz` takes the profile `long`, which draws new examples each time; FUZZ_EXAMPLES is how many
for each test.
"""

import os
from datetime import timedelta

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=30),  # far beyond what any takes: only an endless one fails
    max_examples=60,
    suppress_health_check=SLOW,
)
settings.register_profile(
    "long",
    settings.get_profile("ci"),
    derandomize=False,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "5000")),
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
