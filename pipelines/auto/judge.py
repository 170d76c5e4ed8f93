"""Builds candidates by ordinary runs, and measures how fast, small and good they are."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.common.forward import split_batches
from compress.core.stage import members_of
from compress.core.val_halves import HalfOfVal, halves_of_val
from compress.profiling.benchmark import compare_latency, unmeasurable
from compress.pruning.depth.output_error import OutputErrorMeter
from export.fastest.runtimes import RUNTIMES
from pipelines.auto.candidates import QUANTIZING, Candidate, CheckedModel
from pipelines.runner.inputs import measuring_context
from pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from compress.common.forward import Predictor
    from compress.core.context import Context
    from pipelines.auto.cost_models.tables import LatencyTables
    from pipelines.config.auto_settings import AutoSettings
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.config.run_options import RunOptions
    from pipelines.results.schema import Report

CANDIDATES, STORE = "candidates", ".store"
"""In the results' folder: runs of all candidates, and the stages' results that they share."""
PREDICTED_WITHIN = 1.1
"""Measured over predicted latency, at most, where there is no limit of latency."""


def refuse_other_stages(pipeline: PipelineConfig) -> None:
    """Raise PipelineInvalid for stages that do not leave an eager model, and without data."""
    for index, stage in enumerate(pipeline.stages):
        if "eager" not in {kind.kind for kind in members_of(stage.writes())}:
            raise PipelineInvalid(
                f"{pipeline.place('stages', index)} is {stage.stage}, and `compress auto` itself "
                "prunes, quantizes and exports; keep only stages before these, such as train"
            )
    if pipeline.data is None:
        raise PipelineInvalid(
            f"{pipeline.file}: `compress auto` decides by `val`; add a `data:` section"
        )


def refuse_missing_runtimes(pipeline: PipelineConfig, settings: AutoSettings) -> None:
    """Raise Unavailable for a runtime that is not installed here."""
    for runtime in settings.space.runtimes:
        for need in RUNTIMES[runtime]().all_requirements():
            if need.missing():
                raise Unavailable(
                    f"{pipeline.place('auto', 'space', 'runtimes')}: {runtime} needs {need.what}, "
                    f"which is not installed; {need.install}"
                )


@dataclass
class Judge:
    """The float model, and everything by which others are compared with it."""

    base: PipelineConfig
    settings: AutoSettings
    out: Path
    options: RunOptions
    model: EagerModel
    """What the pipeline's own stages make."""
    context: Context
    decided_on: HalfOfVal
    """The samples of `val` that the search decides by."""
    confirmed_on: HalfOfVal
    """The others, for what it has chosen."""
    meter: OutputErrorMeter
    base_ms: float = 0.0
    """Median time of a call of the float ONNX file, once it is measured; others are measured in
    turn with it."""
    tables: LatencyTables | None = None
    """Latencies of another machine; none are measured then."""

    @classmethod
    def from_pipeline(
        cls, base: PipelineConfig, settings: AutoSettings, out: Path, options: RunOptions
    ) -> Self:
        """Run a pipeline's own stages, and measure the float model that they make.

        Raises:
            PipelineInvalid: the pipeline has stages that the search itself adds, or no data.
            StageFailed: they make no eager model, or the machine is too busy to measure it.
            Unavailable: a runtime is not installed.
        """
        refuse_other_stages(base)
        refuse_missing_runtimes(base, settings)
        whole = Candidate("float")
        _run(whole, base, settings, out, options)
        pipeline = whole.pipeline(base, settings)
        _, _, context = measuring_context(pipeline, out / "work", options.progress)
        last = base.stages[-1].title if base.stages else "source"
        model = Artifact.from_directory(out / CANDIDATES / whole.name / "artifacts" / last)
        if not isinstance(model, EagerModel):
            raise StageFailed(f"{last!r} is a {model.kind!r} artifact, expected an eager model")
        context = replace(context, artifacts={"source": model})
        metric = context.metric.for_model(model.signature).with_inferred_loss(context.data)
        halves = halves_of_val(model, context, "compress auto", metric)
        half = replace(context, data=halves[0].data)
        meter = OutputErrorMeter(model.load(), model.signature, half, "outputs")
        return cls(base, settings, out, options, model, context, *halves, meter)

    @property
    def batch(self) -> int:
        """Samples of a measured call."""
        return self.settings.batch or self.model.signature.smallest_batch

    @property
    def conditions(self) -> str:
        """A hash of all that figures depend on, besides the candidate."""
        # Not on which runtimes, layers in float and blocks are tried: a candidate names its own.
        tried = {"runtimes", "float_layers", "blocks"}
        space = self.settings.space.model_dump(mode="json", exclude=tried)
        metric, threads = self.context.metric.identity(), self.context.threads
        measured_on = machine() if self.tables is None else self.tables.digest
        measured = [threads, self.settings.batch, measured_on]
        content = [self.model.digest, space, QUANTIZING, metric, self.context.seed, measured]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def check(self, candidate: Candidate, predicted_ms: float | None = None) -> CheckedModel:
        """Build, export and measure a candidate by an ordinary run, which the store remembers.

        Raises:
            StageFailed: it cannot be built, or the machine is too busy to measure it.
        """
        report = _run(candidate, self.base, self.settings, self.out, self.options)
        with self._opened(candidate) as predict:
            drop = self.decided_on.drop_points(predict)
            loss = self.meter.measure_predictor(predict).distance ** 2
        return CheckedModel(
            name=candidate.name,
            format=candidate.format,
            runtime=candidate.runtime,
            widths=dict(candidate.widths),
            float_layers=candidate.float_layers,
            removed_blocks=candidate.removed_blocks,
            trained=candidate.trained,
            predicted_ms=predicted_ms,
            latency_ms=self._latency_ms(candidate),
            is_predicted=self.tables is not None,
            bytes=report.stages[-1].measurements.bytes,
            loss=loss,
            drop=drop if math.isfinite(drop) else None,
        )

    def confirm(self, model: CheckedModel) -> CheckedModel:
        """Return a chosen model with its drop on the half of `val` that the search did not see."""
        with self._opened(model.candidate) as predict:
            drop = self.confirmed_on.drop_points(predict)
            between = self.confirmed_on.drop_interval(predict)
        confirmed = drop if math.isfinite(drop) else None
        return model.model_copy(update={"confirmed_drop": confirmed, "confirmed_between": between})

    def speedup_gate(self, model: CheckedModel) -> dict[str, Any] | None:
        """Return the gate by which the machine of the tables judges a predicted latency.

        It is the limit of latency, or the prediction with a margin where there is none, as a
        speedup over the float ONNX file, with which latencies are measured in turn.
        """
        if self.tables is None:
            return None
        most_ms = self.settings.limits.latency or PREDICTED_WITHIN * model.latency_ms
        ratio = float(f"{self.tables.base_ms / most_ms:.4g}")
        return {"gate": "min_speedup", "ratio": ratio, "batch": self.tables.batch}

    def loss_of(self, module: nn.Module) -> float:
        """Return the squared distance of a module's outputs, relative to the float model's."""
        return self.meter.measure(module).distance ** 2

    def _latency_ms(self, candidate: Candidate) -> float:
        if self.tables is not None:
            return self.tables.latency_ms(candidate)
        with self.artifact(candidate).open(self.context.device, self.context.threads) as predict:
            return self.measure_latency_ms(predict)

    def measure_latency_ms(self, predict: Predictor) -> float:
        """Measure a file's latency in turn with the float ONNX file.

        Not in turn with the model in PyTorch, as a run does, nor with many others: between two of
        its calls, a small model's weights would leave the processor's caches.

        Raises:
            StageFailed: the machine is too busy.
        """
        context = self.context
        batches = context.measured_batches(self.model.signature, self.batch)
        with self.artifact(Candidate("float")).open(context.device, context.threads) as base:
            compared = compare_latency(base, predict, batches)
        if compared.interval.unreliable_reason:
            raise StageFailed(unmeasurable("the latency", compared.interval.unreliable_reason))
        # Once: the machine's speed drifts, and ratios do not.
        self.base_ms = self.base_ms or compared.before.p50
        return self.base_ms / compared.speedup

    def pruned_model(self, candidate: Candidate) -> EagerModel:
        """Return a candidate that was built as it is once its blocks are removed."""
        folder = self.out / CANDIDATES / candidate.name / "artifacts" / "prune_layers"
        return EagerModel.from_directory(folder)

    def artifact(self, candidate: Candidate) -> Artifact:
        """Return the file of a candidate that was built."""
        folder = self.out / CANDIDATES / candidate.name / "artifacts" / candidate.export
        return Artifact.from_directory(folder)

    @contextmanager
    def _opened(self, candidate: Candidate) -> Iterator[Predictor]:
        """Open a candidate's file; where outputs depend on the batch, in batches as served."""
        artifact = self.artifact(candidate)
        with self.context.predictor(artifact) as predict:
            size = self.context.judged_batch_size(artifact)
            yield predict if size is None else split_batches(predict, size)


def _run(
    candidate: Candidate,
    base: PipelineConfig,
    settings: AutoSettings,
    out: Path,
    options: RunOptions,
) -> Report:
    """Run a candidate's pipeline; nothing of it is measured, as the judge does so itself."""
    folder = out / CANDIDATES / candidate.name
    folder.mkdir(parents=True, exist_ok=True)
    quiet = replace(
        options,
        cache=out / STORE,
        test=False,
        intermediate=False,
        final=False,
        announce=lambda line: None,
        finished=lambda report: None,
    )
    return candidate.pipeline(base, settings).run(folder, quiet)
