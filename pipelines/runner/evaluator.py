"""Judging what a stage has made: proofs, gates and measurements, each asked once."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.common.errors import GateRefused
from compress.core.baselines import baseline_for
from compress.core.verdict import explain
from compress.profiling.batch_dependence import BatchDependence
from pipelines.results.measurements import Measurements
from pipelines.results.schema import ArtifactReport, StageReport
from pipelines.runner import events
from pipelines.store.local import publish
from pipelines.system.error_context import named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.gate import Gate
    from compress.core.verdict import Verdict
    from pipelines.planning.plan import PlannedStage
    from pipelines.runner.executor import CacheLookup, PipelineExecutor


def evaluate_stage(
    walk: PipelineExecutor, planned: PlannedStage, sought: CacheLookup
) -> StageReport:
    """Prove, publish, measure and judge what a stage has made.

    Raises:
        CompressError: it could not be proved, or not be measured.
    """
    questions, artifact = MeasurementCache(walk, planned.name), walk.artifacts[planned.name]
    _prove(questions, planned, cached=not sought.reason)
    publish(artifact, walk.out / "artifacts" / planned.name)
    with artifact.keep_loaded(walk.pipeline.device, walk.pipeline.threads):
        dependence_of(walk, planned.name, questions)
        verdicts = tuple(_judged_by(questions, planned, gate) for gate in planned.stage.gates)
        measurements = _measured(questions)
    return StageReport(
        name=planned.name,
        stage=planned.stage.stage,
        input=planned.input,
        branch=walk.plan.branch(planned.name),
        cached=not sought.reason,
        reason=sought.reason,
        fetched_from=sought.entry.fetched_from,
        seconds=sought.seconds,
        judged_seconds=questions.seconds,
        artifact=ArtifactReport.of(artifact, f"artifacts/{planned.name}"),
        measurements=measurements,
        verdicts=verdicts,
    )


def measured(walk: PipelineExecutor, name: str) -> tuple[Measurements, float]:
    """Return what is measured of an artifact beside the baseline, and how many seconds it took."""
    questions = MeasurementCache(walk, name)
    return _measured(questions), questions.seconds


def refusal_of(row: StageReport, out: Path) -> GateRefused | None:
    """Return the error that says which gates refused, if any did."""
    refused = [v for v in row.verdicts if not v.passed]
    if not refused:
        return None
    return GateRefused(
        f"{row.name}: {'; '.join(map(explain, refused))} "
        f"(artifact kept in {out / 'artifacts' / row.name})"
    )


@dataclass
class MeasurementCache:
    """What is asked of one artifact, and the seconds that answering took."""

    walk: PipelineExecutor
    name: str
    seconds: float = 0.0

    def get_or_measure(self, question: dict[str, Any], measure: Callable[[], JsonValue]) -> Any:
        """Return what was measured before, or measure, counting the seconds."""

        def timed() -> JsonValue:
            began = time.monotonic()
            try:
                return measure()
            finally:
                self.seconds += time.monotonic() - began

        walk, name = self.walk, self.name
        return walk.entries[name].cached_value(question, walk.artifacts[name], timed)


def _prove(questions: MeasurementCache, planned: PlannedStage, cached: bool) -> None:
    """Hold a cached result against its input, once for each data and machine."""
    walk, name = questions.walk, planned.name

    def prove() -> JsonValue:
        if cached:  # else the stage has just done so itself
            model, artifact = walk.artifacts[planned.input], walk.artifacts[name]
            planned.stage.check_parity(model, artifact, walk.context(name))
        return True

    with named(name, walk.out):
        questions.get_or_measure({"proved against its input": 1, **walk.conditions()}, prove)


def _judged_by(questions: MeasurementCache, planned: PlannedStage, gate: Gate) -> Verdict:
    verdict = _verdict(questions, planned, gate)
    questions.walk.emit(events.gate_event(planned.name, verdict))
    return verdict


def _verdict(questions: MeasurementCache, planned: PlannedStage, gate: Gate) -> Verdict:
    walk, other = questions.walk, gate.against or planned.input
    after = walk.artifacts[planned.name]
    before = baseline_for(gate, walk.artifacts[planned.input], walk.context(planned.name))
    question = {**gate.measurement_key(), "against": before.digest, **walk.conditions()}
    if gate.depends_on_batch:
        if gate.compares and walk.artifacts.get(other) is before:
            dependence_of(walk, other)  # keeps it for later runs
        question |= _batch_size(walk, planned.name, before, after)
    failed: list[Verdict] = []

    def measure() -> float:
        verdict = gate.evaluate(before, after, walk.context(planned.name))
        if verdict.value is None:
            failed.append(verdict)
            raise _Unmeasured
        return verdict.value

    try:
        verdict = gate.verdict(float(str(questions.get_or_measure(question, measure))))
    except _Unmeasured:
        verdict = failed[0]
    return verdict.model_copy(update={"against": other if gate.compares else None})


def _measured(questions: MeasurementCache) -> Measurements:
    walk, name = questions.walk, questions.name
    baseline, artifact = walk.artifacts[walk.plan.baseline], walk.artifacts[name]
    dependence = dependence_of(walk, name, questions)
    question = {"measurements": 2, "against": baseline.digest, **walk.conditions()}
    question |= judged_batch_size(walk, name)

    def measure() -> JsonValue:
        found = Measurements.of(artifact, baseline, walk.context(name))
        if found.doubts:
            raise _Doubtful(found)  # not kept: the next run finds the machine in another state
        return found.model_dump(mode="json")

    with named(name, walk.out):
        try:
            found = Measurements.model_validate(questions.get_or_measure(question, measure))
        except _Doubtful as doubtful:
            found = doubtful.found
    found = found.model_copy(update={"batch_dependence": dependence})
    return found.with_peak(lambda: _peak(questions))


def dependence_of(
    walk: PipelineExecutor, name: str, questions: MeasurementCache | None = None
) -> BatchDependence:
    """Return whether an artifact's answers depend on their batch, as measured once and kept.

    Args:
        walk: the run.
        name: the stage's name.
        questions: counts the seconds, where somebody asks for them.
    """
    artifact, known = walk.artifacts[name], walk.dependences
    if artifact.digest not in known:
        conditions = {k: v for k, v in walk.conditions().items() if k != "metric"}

        def measure() -> JsonValue:
            return walk.context(name).batch_dependence(artifact).model_dump(mode="json")

        with named(name, walk.out):
            found = (questions or MeasurementCache(walk, name)).get_or_measure(
                {"batch dependence": 1, **conditions}, measure
            )
        known[artifact.digest] = BatchDependence.model_validate(found)
    return known[artifact.digest]


def judged_batch_size(walk: PipelineExecutor, name: str) -> dict[str, JsonValue]:
    """Return the number of rows a call has where an artifact is judged, if that decides figures."""
    dependence_of(walk, name)
    return _batch_size(walk, name, walk.artifacts[name])


def _batch_size(walk: PipelineExecutor, name: str, *artifacts: Artifact) -> dict[str, JsonValue]:
    size = walk.context(name).judged_batch_size(*artifacts)
    return {} if size is None else {"batch size": size}


def _peak(questions: MeasurementCache) -> float:
    """Return the peak of memory, which neither metric nor baseline change."""
    walk, name = questions.walk, questions.name
    question = {"peak memory": 2, **walk.conditions()}
    del question["metric"]
    artifact = walk.artifacts[name]
    batch = artifact.signature.smallest_batch
    return float(
        questions.get_or_measure(question, lambda: walk.context(name).peak_memory(artifact, batch))
    )


class _Unmeasured(Exception):
    pass


class _Doubtful(Exception):
    def __init__(self, found: Measurements) -> None:
        super().__init__()
        self.found = found
