"""What a run found: report.json for machines, report.html for people, lock.json to run it again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.strict_json import RUN_SEAL, refuse_changed_run, seal_of_run
from compress.core.verdict import Verdict
from pipelines.results.measurements import Measurements
from pipelines.system.signals import INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compress.artifacts.artifact import Artifact

REPORT, PAGE = "report.json", "report.html"
Status = Literal["passed", "refused", "failed", "interrupted"]


class ArtifactReport(Settings):
    """Where an artifact is and what proves it."""

    kind: str
    path: str
    """Relative to the report."""
    file: str
    """The file to deploy."""
    bytes: int
    sha256: str
    """Of the file to deploy."""
    digest: str
    """Of the artifact's manifest, which holds the hash of every file."""
    facts: dict[str, JsonValue]
    """What the stage found out."""

    @classmethod
    def of(cls, artifact: Artifact, path: str) -> ArtifactReport:
        """Describe an artifact."""
        return cls(
            kind=artifact.kind,
            path=path,
            file=artifact.payload_name,
            bytes=artifact.payload_bytes,
            sha256=artifact.manifest.files[artifact.payload_name].sha256,
            digest=artifact.digest,
            facts=artifact.manifest.facts,
        )


class StageReport(Settings):
    """One stage of a run."""

    name: str
    stage: str
    input: str
    """Name of what it reads."""
    branch: tuple[str, ...] = ()
    """The road to it: the names from `source` to its input."""
    cached: bool
    reason: str
    """Why it had to run; empty when it was cached."""
    fetched_from: str = ""
    """The shared store that it came from; empty where it was made or lay here."""
    seconds: float
    """How long the stage took when it was run."""
    judged_seconds: float = 0.0
    """How long gates and measurements took in this run; 0 when they were known."""
    artifact: ArtifactReport
    measurements: Measurements
    verdicts: tuple[Verdict, ...]
    status: Literal["passed", "refused"] = Field(default_factory=lambda known: _judgement(known))
    """Whether each of its gates passed; a stage with nothing to show is among the failures."""


class FailureReport(Settings):
    """A stage that failed, or at which a run was interrupted, before it had anything to show."""

    name: str
    stage: str
    branch: tuple[str, ...] = ()
    """The road to it: the names from `source` to its input."""
    error: str
    status: Literal["failed", "interrupted"] = Field(
        default_factory=lambda k: INTERRUPTED if k["error"] == INTERRUPTED else "failed"
    )
    """A run that is interrupted may have failures from before."""


class SkippedReport(Settings):
    """A stage that did not run, as one that it depends on did not pass."""

    name: str
    stage: str
    branch: tuple[str, ...]
    """The road to it: the names from `source` to its input."""
    because: str
    """Name of the stage that failed, or that a gate refused."""


class TestReport(Settings):
    """The metric on the test split, touched once, at the end."""

    __test__ = False  # the name is the field's, not pytest's

    metric: str
    values: dict[str, float]
    """By stage name: the baseline, and each artifact that no other stage reads."""


class Report(Settings):
    """A whole run."""

    version: Literal[1] = 1
    pipeline: str
    status: Status
    error: str = ""
    baseline_name: str
    baseline: Measurements | None
    stages: tuple[StageReport, ...]
    warnings: tuple[str, ...] = Field(
        default_factory=lambda known: tuple(
            warnings_of(known["stages"], known["baseline_name"], known["baseline"])
        )
    )
    """What is suspicious though no gate refused it, one line each: losses that no gate judges, data
    that prove little, figures that could not be measured, quantized stages that are slower than
    their float parent, and what artifacts warn of."""
    failed_stage: FailureReport | None = None
    """The first of the failures."""
    failures: tuple[FailureReport, ...] = Field(
        default_factory=lambda known: tuple(filter(None, [known["failed_stage"]]))
    )
    """Stages that failed; those that do not depend on them went on."""
    skipped: tuple[SkippedReport, ...] = ()
    """Stages that did not run because of a failure or a refusal."""
    test: TestReport | None = None
    lock: dict[str, JsonValue] = Field(exclude=True)
    """What is needed to run it again."""

    def write(self, out: Path) -> None:
        """Write report.json, report.html and lock.json; the first seals itself and the last."""
        write_atomically(out / "lock.json", json.dumps(self.lock, indent=1, sort_keys=True) + "\n")
        write_atomically(out / PAGE, self.html(out))
        content = json.loads(self.model_dump_json())
        content[RUN_SEAL] = seal_of_run(content, json.loads(json.dumps(self.lock)))
        text = json.dumps(content, indent=1, ensure_ascii=False)
        write_atomically(out / REPORT, text + "\n")

    @classmethod
    def read(cls, out: Path) -> Self:
        """Read a report back.

        Raises:
            ArtifactInvalid: there is none, it is none of a run's, or was changed since.
        """
        try:
            content = json.loads((out / REPORT).read_text(encoding="utf-8"))
            lock = json.loads((out / "lock.json").read_text(encoding="utf-8"))
            if not {"settings", "versions", "machine"} <= {*lock}:
                raise ValueError("lock.json is not the lock of a run")
            content = {**content}
            refuse_changed_run(content, lock)
            content.pop(RUN_SEAL, None)
            return cls.model_validate({**content, "lock": lock})
        except ValidationError as error:
            place, told = error.errors()[0]["loc"], error.errors()[0]["msg"]
            why = f"{'.'.join(map(str, place))}: {told}"
        except (ArtifactInvalid, OSError, ValueError, TypeError) as error:
            why = str(error)
        raise ArtifactInvalid(f"{out}: holds no readable report ({why})")

    def html(self, out: Path | None = None) -> str:
        """Return the report as one self-contained page.

        Args:
            out: where the artifacts lie, of which the page tells layers and digests; without it,
                or where one is gone, it says that they are not here.
        """
        from pipelines.reporting.html import page_of

        return page_of(self, out)


def withdraw_report(out: Path) -> None:
    """Remove the report of an earlier run: one that is killed must not seem to have passed."""
    for name in (REPORT, PAGE):
        (out / name).unlink(missing_ok=True)


def _judgement(known: dict[str, Any]) -> Literal["passed", "refused"]:
    return "passed" if all(v.passed for v in known["verdicts"]) else "refused"


def warnings_of(
    stages: Sequence[StageReport], baseline_name: str, baseline: Measurements | None
) -> Iterator[str]:
    """Yield what measurements and artifacts warn of."""
    from pipelines.reporting.batch_warnings import batch_warnings
    from pipelines.reporting.quantization_summary import slower_than_float

    yield from batch_warnings(baseline_name, baseline, stages)
    measured = {stage.name: stage.measurements for stage in stages}
    for name, found in ({baseline_name: baseline} | measured).items():
        yield from (f"{name}: {doubt}" for doubt in (found.doubts if found else ()))
    yield from slower_than_float(stages, baseline_name)
    for stage in stages:
        warnings: Any = stage.artifact.facts.get("warnings", ())
        yield from (f"{stage.name}: {warning}" for warning in warnings)


def how_to_run(file: str, out: Path) -> str:
    """Return the command that makes a report again, wherever it is given."""
    path = Path(file)
    if not path.is_file():
        return file
    return shlex.join(["compress", "run", str(path.resolve()), "--out", str(out.resolve())])


def readable_bytes(value: int) -> str:
    """Return a size for people, in powers of 1000."""
    if value < 1000:
        return f"{value} B"
    return f"{value / 1e3:.0f} kB" if value < 1e6 else f"{value / 1e6:.2f} MB"


def readable_count(value: int | None) -> str:
    """Return a count for people; a dash where it is not known."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return str(value)
