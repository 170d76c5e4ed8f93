"""A run's report written anew, beside runs that may be at work in the same directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.lock import at_rest
from pipelines.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def rewrite(out: Path, announce: Callable[[str], None]) -> Report:
    """Return a run's report, and write its page anew unless a run is at work there.

    Raises:
        ArtifactInvalid: there is none.
    """
    with at_rest(out) as nobody_works:
        report = Report.read(out)
        if nobody_works:
            report.write(out)
        else:
            announce(f"{out}: a run is at work; it writes the page when it ends")
    return report
