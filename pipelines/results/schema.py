"""`report.json`, and `lock.json` with everything that is needed to repeat a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, JsonValue, ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import LOCK, read_report, write_report
from compress.pipelines.results.measurements import Measurements
from compress.pipelines.results.schema import (
    FailureReport,
    SkippedReport,
    StageReport,
    TestReport,
    measurement_warnings,
)

REPORT, PAGE = "report.json", "report.html"
Status = Literal["passed", "refused", "failed", "interrupted"]


class Report(Settings):
    """A whole run."""

    version: Literal[1] = 1
    pipeline: str
    status: Status
    error: str = ""
    date: str = ""
    """When the run ended, ISO 8601 in UTC; empty in reports of older versions."""
    baseline_name: str
    baseline: Measurements | None
    stages: tuple[StageReport, ...]
    warnings: tuple[str, ...] = Field(
        default_factory=lambda known: tuple(
            measurement_warnings(known["stages"], known["baseline_name"], known["baseline"])
        )
    )
    """Suspicious results that no gate refused, one line each: losses without a gate, too little
    data, figures that could not be measured, quantized stages that are slower than their float
    parent, and warnings of artifacts."""
    accuracy_doubts: tuple[str, ...] = ()
    """Names of the stages whose accuracy, or that of a model they were made of, a warning is about:
    none of them is recommended."""
    failed_stage: FailureReport | None = None
    """The first of the failures."""
    failures: tuple[FailureReport, ...] = Field(
        default_factory=lambda known: tuple(filter(None, [known["failed_stage"]]))
    )
    """Stages that failed; stages that do not depend on them ran all the same."""
    skipped: tuple[SkippedReport, ...] = ()
    """Stages that did not run because of a failure or a refusal."""
    test: TestReport | None = None
    lock: dict[str, JsonValue] = Field(exclude=True)
    """Content of `lock.json`."""

    def write(self, out: Path, page: str) -> None:
        """Write the report, its rendered page, and lock.json, whose digest report.json holds."""
        write_atomically(out / PAGE, page)
        # Through JSON text, where NaN is null, for readers that are not Python's.
        write_report(out / REPORT, json.loads(self.model_dump_json()), self.lock)

    @classmethod
    def read(cls, out: Path) -> Self:
        """Read a report back.

        Raises:
            ArtifactInvalid: there is no report, it is not a run's, or it was changed.
        """
        try:
            content, lock = read_report(out / REPORT)
            if not lock:
                raise ArtifactInvalid(f"{LOCK} is missing")
            return cls.model_validate({**content, "lock": lock})
        except ValidationError as error:
            place, message = error.errors()[0]["loc"], error.errors()[0]["msg"]
            why = f"{'.'.join(map(str, place))}: {message}"
        except (ArtifactInvalid, OSError) as error:
            why = str(error)
        raise ArtifactInvalid(f"{out}: holds no readable report ({why}); run the pipeline again")


def remove_report(out: Path) -> None:
    """Remove the report of an earlier run, so that a killed run does not seem to have passed."""
    for name in (REPORT, PAGE, LOCK):  # in this order: without the report, no other one is believed
        (out / name).unlink(missing_ok=True)


def rerun_command(file: str, out: Path) -> str:
    """Return the command that repeats a run, with absolute paths."""
    path = Path(file)
    if not path.is_file():
        return file
    return shlex.join(["compress", "run", str(path.resolve()), "--out", str(out.resolve())])


def readable_bytes(value: int) -> str:
    """Format a size in B, kB or MB (powers of 1000)."""
    if value < 1000:
        return f"{value} B"
    return f"{value / 1e3:.0f} kB" if value < 1e6 else f"{value / 1e6:.2f} MB"


def readable_count(value: int | None) -> str:
    """Format a count with k, M or G; a dash for None."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return str(value)
