"""The parts of a report: each stage's result, failure or skip."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError

from compress.artifacts.artifact import NOT_RUN, Artifact
from compress.common.atomic_files import write_atomically
from compress.common.config import Result, Settings
from compress.common.errors import ArtifactInvalid
from compress.common.printable import ShownInNotebooks
from compress.common.sealed_json import LOCK, read_report, write_report
from compress.core.verdict import Verdict
from compress.pipelines.results.measurements import Measurements
from compress.pipelines.system.run_profile import RunProfile
from compress.pipelines.system.signals import INTERRUPTED
from compress.profiling.operator_table import OperatorTable

REPORT, REPORT_PAGE = "report.json", "report.html"
Status = Literal["passed", "refused", "failed", "interrupted"]
FIDELITY = "fidelity"  # fact of a quantized artifact: its outputs against the float model's
SIMULATED_KINDS = {"graph": "; PyTorch simulates integers: export it"}
"""Artifact kinds that simulate quantization, and the hint for their speed."""
SLOWER_RATIO = 0.95  # below which a stage is slower; medians of equal models differ by some percent


class ArtifactReport(Settings):
    """Where an artifact is, and the hashes that identify it."""

    kind: str
    path: str
    """Relative to the report."""
    file: str
    bytes: int
    sha256: str
    """Of the file to deploy."""
    digest: str
    """Of the artifact's manifest, which holds the hash of every file."""
    facts: dict[str, JsonValue]

    @classmethod
    def from_artifact(cls, artifact: Artifact, path: str) -> ArtifactReport:
        """Describe an artifact that lies under a path relative to the report."""
        return cls(
            kind=artifact.kind,
            path=path,
            file=artifact.payload_name,
            bytes=artifact.payload_bytes,
            sha256=artifact.manifest.files[artifact.payload_name].sha256,
            digest=artifact.digest,
            facts=artifact.manifest.facts,
        )


class DeviceReport(Settings):
    """How an artifact's answers on another device differ from those of the same file here."""

    device: str
    equal_labels: float | None
    """Share of the labels on `val` that are the same here; None where there are no labels."""
    equal_to_baseline: float | None
    """Share that are the baseline's."""
    largest_difference: float | None
    """Largest absolute difference of an output; None where there is none, for this reason:"""
    problem: str = ""
    first_difference: str = ""
    """The first layer that differs there, and why; empty where all are equal, or it is unknown."""

    def line(self, baseline: str) -> str:
        """Return it for the terminal."""
        shares = ((self.equal_labels, "those here"), (self.equal_to_baseline, f"{baseline}'s"))
        labels = [
            f"{100 * share:.4g} % of the labels are {of}"
            for share, of in shares
            if share is not None
        ]
        difference = self.problem or f"largest difference {self.largest_difference:.3g}"
        first = self.first_difference and f"; first layer that differs: {self.first_difference}"
        return f"on {self.device}: {', '.join([*labels, difference])}{first}"


class StageOutcome(Result):
    """What became of one stage of a run."""

    name: str
    stage: str
    branch: tuple[str, ...] = ()
    """Names of its ancestors, from `source` to its input."""


class StageReport(StageOutcome):
    """One stage of a run."""

    input: str
    """Name of the stage whose artifact it reads, or `source`."""
    cached: bool
    reason: str
    """Why it had to run; empty when it was cached."""
    fetched_from: str = ""
    """URL of the shared store that the artifact came from; empty if it was made or cached here."""
    seconds: float
    """Seconds that the stage took when it ran."""
    judged_seconds: float = 0.0
    """Seconds that measurements and gates took in this run; 0 when they were cached."""
    artifact: ArtifactReport
    measurements: Measurements
    answered_by: str = ""
    """The stage that exports this one's graph, where its file was called for metric and gates on
    outputs in the graph's place; empty where the artifact itself was."""
    unread_outputs: dict[str, float] = {}
    """Outputs that no loss, metric or gate reads and that differ from the input's by more than
    rounding explains → by how much on `val`, relative to how much the output varies there."""
    operators: tuple[OperatorTable, ...] = ()
    """The operators that took most time in training steps that this run has traced."""
    devices: tuple[DeviceReport, ...] = ()
    """Each device that a gate named in `on`, compared with this machine."""
    verdicts: tuple[Verdict, ...]
    status: Literal["passed", "refused"] = Field(
        default_factory=lambda known: (
            "passed" if all(verdict.passed for verdict in known["verdicts"]) else "refused"
        )
    )
    """Whether all of its gates passed; stages without a result are listed as failures."""


class FailureReport(StageOutcome):
    """A stage that failed or was interrupted before it had a result."""

    error: str
    status: Literal["failed", "interrupted"] = Field(
        default_factory=lambda known: INTERRUPTED if known["error"] == INTERRUPTED else "failed"
    )
    """An interrupted run may contain failed stages, too."""


class SkippedReport(StageOutcome):
    """A stage that did not run because one that it depends on did not pass."""

    because: str
    """Name of the stage that failed, or that a gate refused."""


class TestReport(Settings):
    """The metric on the test split, touched once, at the end."""

    __test__ = False  # the name is the field's, not pytest's

    metric: str
    values: dict[str, float]
    """By stage name: the baseline, and each artifact that no other stage reads."""
    samples: int | None = None
    """Samples that have a target; None in reports of older versions."""
    unlike_val: dict[str, tuple[str, ...]] = {}
    """Where the metric on `test` and on `val` differ beyond their intervals: a line → its stage."""


class Report(ShownInNotebooks, Result):
    """A whole run."""

    version: Literal[1] = 1
    pipeline: str
    status: Status
    error: str = ""
    date: str = ""
    """When the run ended, ISO 8601 in UTC; empty in reports of older versions."""
    baseline_name: str
    baseline: Measurements | None
    baseline_answered_by: str = ""
    """What was called for metric and outputs in the baseline's place, such as `source in ONNX
    Runtime`, its own export; empty where the baseline itself was."""
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
    judged: Literal["full", "quick"] = "full"
    """Whether all was measured, or little: see `judge` of the pipeline file."""
    profile: RunProfile | None = None
    """What the run cost, counted; None unless it was asked for."""
    lock: dict[str, JsonValue] = Field(exclude=True)
    """Content of `lock.json`."""

    def write(self, out: Path, page: str) -> None:
        """Write the report, its rendered page, and lock.json, whose digest report.json holds."""
        write_atomically(out / REPORT_PAGE, page)
        # Through JSON text, where NaN is null, for readers that are not Python's.
        write_report(out / REPORT, json.loads(self.model_dump_json()), self.lock)

    @classmethod
    def read(cls, out: Path) -> Self:
        """Read a report back; ArtifactInvalid where there is none, or it was changed."""
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
    # In this order: without the report, no other one is believed.
    for name in (REPORT, REPORT_PAGE, LOCK):
        (out / name).unlink(missing_ok=True)


def rerun_command(file: str, out: Path, judge: str) -> str:
    """Return the command that repeats a run, with absolute paths."""
    path = Path(file)
    if not path.is_file():
        return file
    quick = ["--quick"] if judge == "quick" else []
    return shlex.join(["compress", "run", str(path.resolve()), "--out", str(out.resolve()), *quick])


def measurement_warnings(
    stages: Sequence[StageReport], baseline_name: str, baseline: Measurements | None
) -> Iterator[str]:
    """Yield a line for each suspicious figure, and each warning in an artifact's facts."""
    yield from batch_warnings(baseline_name, baseline, stages)
    measured = {stage.name: stage.measurements for stage in stages}
    for name, found in ({baseline_name: baseline} | measured).items():
        yield from (f"{name}: {reason}" for reason in (found.unmeasurable_reasons if found else ()))
        own = found.same_runtime if found else None
        if own and not own.takes_uncompressed:
            yield f"{name}: what compression gains in speed is not known: {own.speedup_reason}"
    yield from slower_than_float(stages, baseline_name)
    usual = baseline.device if baseline else ""
    for stage in stages:
        device = stage.measurements.device
        if usual and device and device != usual:
            yield (
                f"{stage.name}: runs on {device}, and so did {baseline_name} where the two speeds "
                f"were compared; {baseline_name}'s own latency is that on {usual}"
            )
    for stage in stages:
        for output, distance in stage.unread_outputs.items():
            yield (
                f"{stage.name}: output {output!r} differs from that of {stage.input} by "
                f"{100 * distance:.2g} % of how much it varies on val, and no loss, metric or gate "
                "reads it: nothing made from it is named for deployment; judge it by a metric of "
                "your own (metric: module:function gets all outputs), add {gate: parity, atol: …}, "
                "or leave it out of model.outputs"
            )
        for prepared in stage.measurements.preparation:
            if prepared.difference:
                taken = "; servers do not take them" if prepared.is_wrong else ""
                yield f"{stage.name}: {prepared.difference}{taken}"
        if reason := stage.artifact.facts.get(NOT_RUN):
            yield f"{stage.name}: {reason}; its answers and its speed are not known"
        warnings: Any = stage.artifact.facts.get("warnings", ())
        yield from (f"{stage.name}: {warning}" for warning in warnings)


def batch_warnings(
    baseline_name: str, baseline: Measurements | None, stages: Sequence[StageReport]
) -> Iterator[str]:
    """Yield a line for each model whose outputs depend on its batch, the first of each branch."""
    found = {s.name: s.measurements.batch_dependence for s in stages}
    if baseline is not None:
        found.setdefault(baseline_name, baseline.batch_dependence)
    rows = {stage.name: stage for stage in stages}
    depends = {name: d for name, d in found.items() if d is not None and d.depends}
    for name, dependence in depends.items():
        if name not in rows or rows[name].input not in depends:
            descendants = [
                s.name
                for s in stages
                if s.name in depends and any(at.input == name for at in _lineage(s, rows))
            ]
            also = f" (and {', '.join(descendants)})" if descendants else ""
            yield (
                f"{name}{also}: answers depend on what else is in the batch: {dependence.line()}; "
                "judged with `served_batch_size` rows in a call (1 by default), and its requests "
                "are not joined"
            )


def slower_than_float(stages: Sequence[StageReport], baseline: str) -> Iterator[str]:
    """Yield a line for each deployable stage that compression made slower.

    It is compared with the uncompressed model in the same runtime, and if it is quantized, with its
    float parent in that runtime if that was measured. A simulated model that a later stage exports
    is left out, as only the export is deployed.
    """
    rows = {stage.name: stage for stage in stages}
    read = {stage.input for stage in stages}
    for stage in stages:
        own, where = stage.measurements.same_runtime, SIMULATED_KINDS.get(stage.artifact.kind, "")
        if own is None or own.speedup is None or (where and stage.name in read):
            continue
        quantized = _quantizing_stage(stage, rows)
        parent = None
        if quantized is not None:
            exported = _exported_parent(stage, quantized.input, rows)
            parent = exported or (rows.get(quantized.input) if where else None)
        if own.is_slower:
            against = f"{baseline} in {own.runtime} ({own.speedup:.2g}×)"
            yield f"{stage.name}: slower than {against}{where}"
        elif parent and parent.measurements.speedup and stage.measurements.speedup:
            ratio = stage.measurements.speedup / parent.measurements.speedup
            if ratio < SLOWER_RATIO:
                yield f"{stage.name}: slower than {parent.name} ({ratio:.2g}×){where}"


def _lineage(stage: StageReport, rows: Mapping[str, StageReport]) -> Iterator[StageReport]:
    current: StageReport | None = stage
    while current is not None:
        yield current
        current = rows.get(current.input)


def _quantizing_stage(stage: StageReport, rows: Mapping[str, StageReport]) -> StageReport | None:
    """Return the first stage of the lineage that quantized the model; None if all are float."""
    found = [s for s in _lineage(stage, rows) if FIDELITY in s.artifact.facts]
    return found[-1] if found else None


def _exported_parent(
    stage: StageReport, parent: str, rows: Mapping[str, StageReport]
) -> StageReport | None:
    """Return the stage that exported the float parent into the same format."""
    for other in rows.values():
        if other.artifact.kind != stage.artifact.kind or _quantizing_stage(other, rows):
            continue
        for ancestor in _lineage(other, rows):
            if ancestor.artifact.kind == "eager":  # a changed model, and no export of the parent
                break
            if ancestor.input == parent:
                return other
    return None
