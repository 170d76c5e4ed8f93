"""Builds candidates by ordinary runs, and measures how fast, small and good they are."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.forward import split_batches
from compress.core.val_halves import HalfOfVal, halves_of_val
from compress.profiling.benchmark import unmeasurable
from compress.pruning.depth.output_error import OutputErrorMeter
from pipelines.auto.candidates import EXPORT, Candidate, CheckedModel
from pipelines.runner.inputs import measuring_context
from pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from compress.common.forward import Predictor
    from compress.core.context import Context
    from pipelines.config.auto_settings import AutoSettings
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.config.run_options import RunOptions
    from pipelines.results.schema import Report

CANDIDATES, STORE = "candidates", ".store"
"""In the results' folder: runs of all candidates, and the stages' results that they share."""


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

    @classmethod
    def from_pipeline(
        cls, base: PipelineConfig, settings: AutoSettings, out: Path, options: RunOptions
    ) -> Self:
        """Run a pipeline's own stages, and measure the float model that they make.

        Raises:
            StageFailed: they make no eager model, or the machine is too busy to measure it.
        """
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
    def conditions(self) -> str:
        """A hash of all that figures depend on, besides the candidate."""
        space = self.settings.model_dump(mode="json", include={"space"})
        metric, threads = self.context.metric.identity(), self.context.threads
        measured = [threads, self.settings.batch, machine()]
        content = [self.model.digest, space, metric, self.context.seed, measured]
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
            widths=dict(candidate.widths),
            trained=candidate.trained,
            predicted_ms=predicted_ms,
            latency_ms=self._latency_ms(candidate),
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

    def loss_of(self, module: nn.Module) -> float:
        """Return the squared distance of a module's outputs, relative to the float model's."""
        return self.meter.measure(module).distance ** 2

    def _latency_ms(self, candidate: Candidate) -> float:
        """Measure a candidate's file in turn with the float one.

        Not in turn with the model in PyTorch, as a run does: between two of its calls, a small
        model's weights leave the processor's caches.
        """
        base, own = self._artifact(Candidate("float")), self._artifact(candidate)
        batch = self.settings.batch or self.model.signature.smallest_batch
        compared = self.context.compare_latency(base, own, batch)
        if compared.interval.unreliable_reason:
            raise StageFailed(unmeasurable("the latency", compared.interval.unreliable_reason))
        # Once: the machine's speed drifts, and ratios do not.
        self.base_ms = self.base_ms or compared.before.p50
        return self.base_ms / compared.speedup

    def _artifact(self, candidate: Candidate) -> Artifact:
        folder = self.out / CANDIDATES / candidate.name / "artifacts" / EXPORT
        return Artifact.from_directory(folder)

    @contextmanager
    def _opened(self, candidate: Candidate) -> Iterator[Predictor]:
        """Open a candidate's file; where outputs depend on the batch, in batches as served."""
        artifact = self._artifact(candidate)
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
    """Run a candidate's pipeline, without a look at `test`."""
    folder = out / CANDIDATES / candidate.name
    folder.mkdir(parents=True, exist_ok=True)
    quiet = replace(
        options,
        cache=out / STORE,
        test=False,
        announce=lambda line: None,
        finished=lambda report: None,
    )
    return candidate.pipeline(base, settings).run(folder, quiet)
