"""Evaluates the result of a stage: comparison with its input, gates and measurements.

Whatever was measured before on the same artifact, data and machine is taken from the store.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from compress.common.dependency_recorder import Recording, recording
from compress.common.errors import StageFailed, first_line
from compress.core.devices import devices
from compress.core.gates.cost import MeasuredOnVal
from compress.core.gates.quality import LabelAgreement, Parity
from compress.core.gates.runtime import baseline_name
from compress.core.metrics.score import Score
from compress.core.stage import evaluate_gates
from compress.export.common.remote_device import RemoteDevice
from compress.export.exporter import Exporter
from compress.pipelines.planning.plan import PlannedStage, reads_all_outputs
from compress.pipelines.results.measurements import JUDGED_QUICKLY, NOT_MEASURED, Measurements
from compress.pipelines.results.schema import (
    FIDELITY,
    SIMULATED_KINDS,
    ArtifactReport,
    DeviceReport,
    StageReport,
)
from compress.pipelines.store.local import publish
from compress.pipelines.system.error_context import name_stage_in_errors
from compress.profiling.batch_dependence import BatchDependence
from compress.profiling.operator_table import read_operator_tables
from compress.serve.http.loaded_model import SERVED_KINDS
from compress.serve.packaging.request_forms import forms_of
from compress.serve.packaging.val_preparation import Preparation, compare_preparation

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.gates.gate import Gate
    from compress.core.verdict import Verdict
    from compress.pipelines.runner.run_state import CacheLookup, RunState
    from compress.pipelines.store.entry import Entry

T = TypeVar("T")
LAYERS_ROWS = 16  # of `val`, on which the layers of a file are compared


@dataclass
class MeasurementCache:
    """Measurements of one artifact: looked up in its store entry, taken where they are missing."""

    entry: Entry
    artifact: Artifact
    seconds: float = 0.0
    """How long taking them has lasted so far."""

    def get_or_measure(
        self,
        key: dict[str, Any],
        measure: Callable[[], T],
        load: Callable[[Any], T | None] = lambda stored: stored,
        dump: Callable[[T], Any] = lambda value: value,
    ) -> T:
        """Return a stored measurement, or take and store it.

        `key` has what is measured, and everything that it depends on. `load` makes a measurement of
        what `dump` returned, or None where it is to be taken again; where `dump` returns None
        nothing is stored, so that the next run measures again.
        """
        stored = self.entry.lookup(key, self.artifact)
        if stored is not None and (known := load(stored.value)) is not None:
            return known
        began = time.monotonic()
        try:
            with recording() as recorded:
                value = measure()
        finally:
            self.seconds += time.monotonic() - began
        content = dump(value)
        if content is not None:
            self.entry.store(key, self.artifact, content, recorded)
        return value


class ArtifactEvaluator(MeasurementCache):
    """Measures an artifact of a run, and judges it by the gates of its stage."""

    def __init__(self, state: RunState, name: str) -> None:
        super().__init__(state.entries[name], state.artifacts[name])
        self.state, self.name = state, name

    @property
    def context(self) -> Context:
        """The context that the artifact is called in."""
        return self.state.context(self.name)

    def evaluate(self, planned: PlannedStage, lookup: CacheLookup) -> StageReport:
        """Publish a result, compare it with its input, evaluate its gates and measure it."""
        state, name, artifact, context = self.state, self.name, self.artifact, self.context
        # A gate `on` a device may be against this very file, here.
        context = replace(context, artifacts={**context.artifacts, name: artifact})
        self.check_parity(planned, lookup)
        # Before its gates: what they refuse is kept for a look, too.
        publish(artifact, state.out / "artifacts" / name)
        # Gates and measurements open the model once.
        with artifact.keep_loaded():
            gates, model = planned.stage.gates, state.artifacts[planned.input]
            evaluate = functools.partial(self._evaluate_gate, planned)
            verdicts = evaluate_gates(gates, model, artifact, context, evaluate)
            used = dict.fromkeys(device for gate in gates for device in gate.on)
            compared = tuple(map(self._compare_device, used))
            if artifact.not_run or name in state.unmeasured:
                baseline = state.artifacts[state.plan.baseline]
                why = state.why_unmeasured
                why = f"{NOT_MEASURED}{artifact.not_run}" if artifact.not_run else why
                measurements = Measurements.sizes(artifact, baseline, context, why)
            else:
                measurements = self.measure()
        moved = self._moved_outputs(planned, measurements)
        reads_outputs = any(gate.depends_on_batch for gate in gates)
        is_called = measurements.metric is not None or reads_outputs
        others = [] if reads_all_outputs(state.plan, planned) else artifact.signature.outputs[1:]
        unread = {o.name for o in others} - {name for v in verdicts for name in v.outputs}
        return StageReport(
            name=name,
            stage=planned.stage.stage,
            input=planned.input,
            branch=state.plan.branch(name),
            cached=lookup.cached,
            reason=lookup.reason,
            fetched_from=lookup.entry.fetched_from,
            seconds=lookup.seconds,
            judged_seconds=self.seconds,
            artifact=ArtifactReport.from_artifact(artifact, f"artifacts/{name}"),
            measurements=measurements,
            answered_by=state.exported_as.get(name, "") if is_called else "",
            unread_outputs={name: error for name, error in moved.items() if name in unread},
            # A stage from the cache was not trained: the folder may hold those of other settings.
            operators=() if lookup.cached else read_operator_tables(state.out / "profiles", name),
            devices=compared,
            verdicts=verdicts,
        )

    def _compare_device(self, device: str) -> DeviceReport:
        """Compare the file's answers on a device with those here, and the baseline's."""
        artifact, context, there = self.artifact, self.context, devices()[device]
        baseline = self.state.artifacts[self.state.plan.baseline]
        labels = LabelAgreement(on=(device,))
        has_labels = context.task is None or not labels.unsuitable_task(context.task)

        def equal_labels(before: Artifact) -> float | None:
            return labels.evaluate(before, artifact, context).value if has_labels else None

        def measure() -> DeviceReport:
            parity = Parity(atol=0, on=(device,)).evaluate(artifact, artifact, context)
            first, signature = "", artifact.signature
            if parity.value != 0 and isinstance(there, RemoteDevice):
                from compress.export.onnx.first_difference import first_difference

                rows = LAYERS_ROWS if signature.batch_axis else signature.smallest_batch
                inputs = next(context.comparison_inputs(signature, rows))
                try:
                    first = first_difference(artifact.payload_path, there, inputs, context.threads)
                except Exception as error:  # noqa: BLE001 - the verdicts stand without a cause
                    first = f"not found: {first_line(error)}"
            return DeviceReport(
                device=device,
                equal_labels=equal_labels(artifact),
                equal_to_baseline=equal_labels(baseline),
                largest_difference=parity.value,
                problem=parity.reason,
                first_difference=first,
            )

        key = {"compared on": f"{device} {there.version}", "against": baseline.digest}
        return self.get_or_measure(
            key | self._conditions(baseline),
            measure=measure,
            load=DeviceReport.model_validate,
            # What could not be compared is tried again by the next run.
            dump=lambda found: None if found.problem else found.model_dump(mode="json"),
        )

    def check_parity(self, planned: PlannedStage, lookup: CacheLookup) -> None:
        """Compare a cached artifact with its input on this run's data, unless that was done."""
        model, context = self.state.artifacts[planned.input], self.context

        def check() -> bool:
            # A stage that has just run has done so itself.
            if lookup.cached and not self.artifact.not_run:
                planned.stage.check_parity(model, self.artifact, context)
            return True

        with name_stage_in_errors(self.name, self.state.out):
            # The number goes up where more is compared.
            key = {"proved against its input": 2, **self.state.measurement_conditions()}
            self.get_or_measure(key, check)

    def _moved_outputs(self, planned: PlannedStage, measurements: Measurements) -> dict[str, float]:
        """Return by how much outputs differ from the input's on `val`, where rounding is no reason.

        Raise StageFailed where the stage must keep them.
        """
        state, model, artifact = self.state, self.state.artifacts[planned.input], self.artifact
        report, before = state.reports.get(planned.input), state.baseline
        if planned.input != state.plan.baseline:
            before = report.measurements if report else None
        if before is None or not (before.outputs and measurements.outputs):
            return {}
        if state.exported_as.get(planned.input) == self.name:
            return {}  # this file answered for its input, with which the export compared it
        context = self.context
        if context.judged_batch_size(model) != context.judged_batch_size(artifact):
            return {}  # they were called in other batches, on which outputs depend
        limit, moved = planned.stage.rounding_error(model, artifact), {}
        names = [output.name for output in artifact.signature.outputs]
        for name, own, other in zip(names, before.outputs, measurements.outputs, strict=False):
            distance = own.relative_distance(other)
            if distance is not None and not distance <= limit:
                moved[name] = distance
        if moved and planned.stage.keeps_outputs:
            errors = ", ".join(f"output {name!r} by {error:.2g}" for name, error in moved.items())
            raise StageFailed(
                f"{self.name}: on all {measurements.outputs[0].rows} rows of `val` answers differ "
                f"from the source's by more than {limit:g} of their spread: {errors}"
            )
        return moved

    def _evaluate_gate(
        self, planned: PlannedStage, gate: Gate, before: Artifact, after: Artifact, context: Context
    ) -> Verdict:
        """Evaluate a gate on the value that was measured before, if any, and emit the verdict."""
        state, name = self.state, self.name
        compared = baseline_name(gate, after.kind, planned.input, state.plan.baseline)
        key, conditions = gate.measurement_key(), state.measurement_conditions()
        if gate.depends_on_batch:
            # Stored in the other artifact's entry, where later runs find it.
            if gate.compares and state.artifacts.get(compared) is before:
                ArtifactEvaluator(state, compared).batch_dependence(context)
            conditions = self._conditions(*((before,) if gate.compares else ()))

        def unless_refused_by_time(stored: Any) -> Verdict | None:
            # Time and memory may be those of a busy moment: they are measured again then.
            found = gate.stored_verdict(stored)
            return None if gate.may_vary and not found.passed else found

        verdict = self.get_or_measure(
            # The limit is no part of the key: a changed limit is held against the stored value.
            {**key, "against": before.digest, **conditions},
            measure=lambda: gate.evaluate(before, after, context),
            load=unless_refused_by_time,
            dump=lambda verdict: verdict.measured,
        )
        verdict = verdict.model_copy(update={"against": compared if gate.compares else None})
        words, level = ("passed", "info") if verdict.passed else ("refused", "error")
        line, fields = f"{name}: {verdict.gate} {words}", verdict.model_dump(mode="json")
        state.emit("gate_judged", name, line, fields, level, is_announced=False)
        return verdict

    def measure(self, while_loaded: Callable[[], object] = bool, untimed: str = "") -> Measurements:
        """Measure metric, size, latency and memory, compared with the run's baseline.

        Latency and memory are not with a reason why they are `untimed`, nor of what only simulates
        its export. `while_loaded` is called once the metric is known, while what answers is open.
        """
        state, artifact = self.state, self.artifact
        baseline = state.artifacts[state.plan.baseline]
        # What answers is opened once for all of it, and closed before two models are timed.
        with self.context.form_of(artifact).keep_loaded():
            dependence = self.batch_dependence()
            if state.data and "val" in state.data.datasets and state.plan.metric.is_measured:
                self.score("val")
            if while_loaded is not None:
                while_loaded()
        context, conditions = self.context, state.measurement_conditions()
        # The number goes up where other things are measured: stored values are then taken again.
        key: dict[str, Any] = {"measurements": 4, "against": baseline.digest}
        if untimed := untimed or _why_untimed(state, self.name):
            key["untimed"] = untimed
        with name_stage_in_errors(self.name, state.out), artifact.keep_loaded():
            measurements = self.get_or_measure(
                key | self._conditions(),
                measure=lambda: Measurements.from_artifact(artifact, baseline, context, untimed),
                load=Measurements.model_validate,
                # On a machine too busy to tell, the next run measures again.
                dump=lambda found: (
                    None if found.unmeasurable_reasons else found.model_dump(mode="json")
                ),
            )
        prepared = {"batch_dependence": dependence, "preparation": self._preparation()}
        measurements = measurements.model_copy(update=prepared)
        if untimed:
            return measurements
        if state.is_quick:
            return measurements.model_copy(update={"peak_reason": JUDGED_QUICKLY})
        # Neither the metric nor the baseline changes how much memory an artifact takes.
        key = {"peak memory": 2, **{k: v for k, v in conditions.items() if k != "metric"}}
        batch = artifact.signature.smallest_batch
        try:
            peak = self.get_or_measure(key, lambda: context.peak_memory(artifact, batch), float)
            return measurements.model_copy(update={"peak_mebibytes": peak})
        except StageFailed as error:
            return measurements.model_copy(update={"peak_reason": str(error)})

    def _preparation(self) -> tuple[Preparation, ...]:
        artifact, data = self.artifact, self.state.data
        if artifact.kind not in SERVED_KINDS or data is None or "val" not in data.datasets:
            return ()
        forms = forms_of(artifact)
        if not forms:
            return ()
        key = {"preparation": 1, **self.state.measurement_conditions()}
        del key["metric"]
        return self.get_or_measure(
            key,
            measure=lambda: tuple(compare_preparation(forms, artifact.signature, data)),
            load=lambda stored: tuple(map(Preparation.model_validate, stored)),
            dump=lambda found: [each.model_dump(mode="json") for each in found],
        )

    def score(self, split: str) -> Score:
        """Return the metric on a split, by sample, from the store if it was measured before.

        The run's contexts find it from then on, so that no other comparison reads the split again.
        """
        context = self.context
        with name_stage_in_errors(self.name, self.state.out):
            score = self.get_or_measure(
                {"metric by part, and outputs": split, **self._conditions()},
                measure=lambda: context.score_by_sample(self.artifact, split),
                load=Score.from_json,
                dump=Score.to_json,
            )
            known = context.score_key(self.artifact, split)
            self.state.caches.scores.setdefault(known, (score, Recording()))
        return score

    def batch_dependence(self, context: Context | None = None) -> BatchDependence:
        """Return whether outputs depend on what else is in the batch.

        Those of the file that answers in the artifact's place, where one does in the context: by
        default that of the artifact's own stage.
        """
        context, known = context or self.context, self.state.caches.dependences
        form = context.form_of(self.artifact)
        if form.digest not in known:
            key = {"batch dependence": 1, **self.state.measurement_conditions()}
            del key["metric"]
            if form is not self.artifact:
                key["answered by"] = form.digest
            with name_stage_in_errors(self.name, self.state.out):
                known[form.digest] = self.get_or_measure(
                    key,
                    measure=lambda: context.batch_dependence(form),
                    load=BatchDependence.model_validate,
                    dump=lambda found: found.model_dump(mode="json"),
                )
        return known[form.digest]

    def _conditions(self, *before: Artifact) -> dict[str, Any]:
        """Return what a measurement depends on: the run, what is called, and with how many rows."""
        self.batch_dependence()
        context, conditions = self.context, self.state.measurement_conditions()
        if (size := context.judged_batch_size(*before, self.artifact)) is not None:
            conditions["batch size"] = size
        if (form := context.form_of(self.artifact)) is not self.artifact:
            conditions["answered by"] = form.digest
        return conditions


def _why_untimed(state: RunState, name: str) -> str:
    """Return why nobody needs to know what a call of an artifact costs; empty where somebody does.

    PyTorch computes the integers of a quantized graph in floats, dearer than the float model; the
    file that an exporter makes of it is what is fast. A gate that asks for its cost measures it.
    """
    stages, artifact = state.plan.stages, state.artifacts[name]
    exports = [p.name for p in stages if p.input == name and isinstance(p.stage, Exporter)]
    quantized = artifact.kind in SIMULATED_KINDS and FIDELITY in artifact.manifest.facts
    if not (quantized and exports):
        return ""
    gates = [(p.name, gate) for p in stages for gate in p.stage.gates]
    is_asked = any(
        isinstance(gate, MeasuredOnVal) and name in (stage, gate.against) for stage, gate in gates
    )
    return "" if is_asked else f"{NOT_MEASURED}exported by {exports[0]}"
