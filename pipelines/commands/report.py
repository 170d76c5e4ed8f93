"""`compress report`: render a run's page again, unless another run is using its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import ArtifactInvalid
from compress.pipelines.reporting.html import render
from compress.pipelines.results.schema import REPORT, Report
from compress.pipelines.store.local import keep_idle
from compress.pipelines.system.jsonl_log import LOG

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def rerender_report(out: Path, announce: Callable[[str], None]) -> Report:
    """Read a run's report, and write its page again if no run is using the directory.

    Raises:
        ArtifactInvalid: there is no report, as the last run there was killed or is still at work.
    """
    with keep_idle(out) as nobody_works:
        if (out / ".store").is_dir() and not (out / REPORT).exists():
            if not nobody_works:
                raise ArtifactInvalid(f"{out}: a run is at work; it writes its report when it ends")
            raise ArtifactInvalid(
                f"{out}: the last run ended before it could write a report; {out / LOG} says how "
                "far it came, and running it again goes on"
            )
        report = Report.read(out)
        if not nobody_works:
            announce(f"{out}: a run is at work; it writes the page when it ends")
            return report
        try:
            report.write(out, render(report, out))
        except OSError as error:
            announce(f"{out}: the page is not written anew ({error.strerror or error})")
    return report
