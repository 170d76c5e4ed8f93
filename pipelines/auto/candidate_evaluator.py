"""Builds candidates by ordinary runs, and measures their latency, size, memory and accuracy."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.common.forward import Predictor, accept_any_batch, split_batches
from compress.common.sealed_json import read_state, write_state
from compress.core.metrics.metric import METRIC_ADVICE
from compress.core.stage import members_of
from compress.core.val_halves import HalfOfVal, halves_of_val
from compress.export.exporter import EXPORTERS
from compress.export.latency.resizing import is_float, leave_float, weighted_layers
from compress.export.onnx.proto_io import read, write
from compress.export.onnx.session import session_predictor
from compress.pipelines.api import Pipeline
from compress.pipelines.auto.candidates import (
    CANDIDATES,
    QUANTIZING,
    STORE,
    Candidate,
    CheckedModel,
    after_stages,
    last_stage,
)
from compress.pipelines.auto.cost_models import LatencyTables, LayerSensitivity
from compress.pipelines.auto.deadline import progress_until
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.inputs import measuring_context
from compress.pipelines.system.machine_info import machine
from compress.profiling.benchmark import (
    Comparison,
    NotMeasurable,
    compare_latency,
    unmeasurable,
)
from compress.pruning.depth.block_search import OutputErrorMeter
from compress.quantization.mixed_precision.bit_search import weighted_layers as layers_of_module

if TYPE_CHECKING:
    from torch import nn

    from compress.core.context import Context
    from compress.pipelines.config.auto_settings import AutoSettings
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.config.run_options import RunOptions
    from compress.pipelines.results.schema import Report
    from compress.profiling.benchmark import Opener

LAYERS_COMPARED_ON = 64  # samples, to compare models with one quantized layer; as `quantize_mixed`


def without_searched_stages(
    base: PipelineConfig, settings: AutoSettings
) -> tuple[PipelineConfig, list[str]]:
    """Return a pipeline up to the first stage that the search chooses, and what is left out."""
    searched = {"prune_channels": settings.space.widths, "prune_layers": settings.space.blocks}
    kept = 0
    for stage in base.stages:
        # A quantized or exported model is no eager one.
        if searched.get(stage.stage) or "eager" not in {k.kind for k in members_of(stage.writes())}:
            break
        kept += 1
    left_out = [stage.title for stage in base.stages[kept:]]
    return base.model_copy(update={"stages": base.stages[:kept]}), left_out


def refuse_unfit_pipeline(base: PipelineConfig, settings: AutoSettings) -> None:
    """Refuse a file without data, a missing runtime, and stages that cannot follow an export."""
    if base.data is None:
        raise PipelineInvalid(
            f"{base.file}: `compress auto` decides by `val`; add a `data:` section"
        )
    if base.metric is not None and base.metric.name == "none":
        where = f"{base.place('metric')}: none"
        # The file by its name: given the model again, `compress auto` writes another one over it.
        raise PipelineInvalid(
            f"{where}: `compress auto` decides by a metric; {METRIC_ADVICE}; then: compress auto "
            f"{base.file}"
        )
    for runtime in settings.space.runtimes:
        where = f"{base.place('auto', 'space', 'runtimes')}: {runtime}"
        for need in EXPORTERS[runtime].model_validate({}).all_requirements():
            if need.missing():
                raise Unavailable(f"{where} {need.problem}")
    for runtime in settings.space.runtimes if settings.after else ():
        content = Candidate("float", runtime=runtime).content(base, settings)
        stages = [*content["stages"], *after_stages(settings)]
        pipeline = Pipeline.model_validate({**content, "stages": stages})
        pipeline._source = base._source
        try:
            build_plan(pipeline)
        except PipelineInvalid as error:
            message = str(error)
            for number in range(len(settings.after)):
                place = pipeline.place("stages", len(content["stages"]) + number)
                message = message.replace(place, base.place("auto", "after", number))
            raise PipelineInvalid(message) from None


@dataclass
class CandidateEvaluator:
    """The float model, and everything by which candidates are compared with it."""

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
    """Median time of a call of the float ONNX file, once measured; others are in turn with it."""
    tables: LatencyTables | None = None
    """Latencies of another machine; none are measured then."""

    @classmethod
    def from_pipeline(
        cls, base: PipelineConfig, settings: AutoSettings, out: Path, options: RunOptions
    ) -> Self:
        """Run a pipeline's own stages, and measure the float model that they make."""
        refuse_unfit_pipeline(base, settings)
        whole, last = Candidate("float"), last_stage(base)
        _run(whole, base, settings, out, options)
        pipeline = whole.pipeline(base, settings)
        _, _, context, _ = measuring_context(pipeline, out / "work", options.progress)
        model = Artifact.from_directory(whole.artifacts(out) / last)
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

    def evaluate(
        self,
        candidate: Candidate,
        predicted_ms: float | None = None,
        deadline: float = math.inf,
    ) -> CheckedModel:
        """Build, export and measure a candidate by an ordinary run, which the store remembers.

        Raises:
            OutOfTime: a deadline of :func:`time.monotonic` was over before it was made.
        """
        options = replace(self.options, progress=progress_until(deadline, self.options.progress))
        report = _run(candidate, self.base, self.settings, self.out, options)
        with self._opened(candidate) as predict:
            drop = self.decided_on.drop_points(predict)
            loss = self.meter.measure_predictor(predict).distance ** 2
        measured = report.stages[-1].measurements
        peak = measured.peak_mebibytes
        if self.settings.limits.memory is not None:
            if self.batch != self.model.signature.smallest_batch:  # the run has measured others
                peak = self.context.peak_memory(self.artifact(candidate), self.batch)
            elif peak is None:
                raise StageFailed(measured.peak_reason)
        latency_ms, latency_upper_ms, p95_ms = self._latency(candidate)
        return CheckedModel(
            name=candidate.name,
            **candidate.settings(),
            predicted_ms=predicted_ms,
            latency_ms=latency_ms,
            latency_upper_ms=latency_upper_ms,
            p95_ms=p95_ms,
            is_predicted=self.tables is not None,
            bytes=measured.bytes,
            peak_mebibytes=peak,
            loss=loss,
            drop=drop if math.isfinite(drop) else None,
        )

    def confirm(self, model: CheckedModel) -> CheckedModel:
        """Return a chosen model with its drop on the half of `val` that the search did not see."""
        with self._opened(model.candidate) as predict:
            drop, between = self.confirmed_on.drop_with_interval(predict)
        confirmed = drop if math.isfinite(drop) else None
        return model.model_copy(update={"confirmed_drop": confirmed, "confirmed_between": between})

    def loss_of(self, module: nn.Module) -> float:
        """Return the squared distance of a module's outputs, relative to the float model's."""
        return self.meter.measure(module).distance ** 2

    def _latency(self, candidate: Candidate) -> tuple[float, float | None, float | None]:
        """Return the median time of a call, its upper end, and the 95th percentile, in ms."""
        if self.tables is not None:
            return self.tables.latency_ms(candidate), None, None
        compared = self._compared_with_float(self._opener(candidate))
        median_ms, after = self.base_ms / compared.speedup, compared.after
        upper_ms = self.base_ms / compared.interval.low
        doubt, limit = after.doubt_of("p95"), self.settings.limits.latency
        if doubt:
            if limit is not None and limit.p95_ms is not None:
                raise NotMeasurable(unmeasurable("p95 in ms", doubt))
            return median_ms, upper_ms, None
        return median_ms, upper_ms, median_ms * after.p95 / after.p50

    def measure_latency_ms(self, file: Opener) -> float:
        """Measure the median latency of a file in turn with the float ONNX file."""
        speedup = self._compared_with_float(file).speedup  # it sets `base_ms`
        return self.base_ms / speedup

    def layer_sensitivity(self, whole: CheckedModel, deadline: float) -> LayerSensitivity:
        """Measure what quantizing each layer alone loses; what is known already is read.

        The file of the whole quantized model is taken with all other layers put back to float, so
        that no model is quantized or exported for it. Losses are scaled such that their sum is that
        of the whole model. Layers that are not measured by `deadline`, on the clock of
        :func:`time.monotonic`, are left out.
        """
        state_file, digest = self.out / "layers.json", self.model.digest
        known = read_state(state_file, digest, dict[str, float]) or {}
        model, format, context = self.model, whole.format, self.context
        artifact = self.artifact(Candidate(format))
        quantized = read(artifact.payload_path, weights=True)
        nodes, layers = weighted_layers(quantized), layers_of_module(model.load(), model.signature)
        if len(nodes) != len(layers):
            raise StageFailed(f"the file has {len(nodes)} layers with weights, not {len(layers)}")
        numbers: dict[str, tuple[int, ...]] = {}
        integers = [number for number, node in enumerate(nodes) if not is_float(node)]
        for number in integers:
            if (name := layers[number].name) is not None:
                numbers[name] = (*numbers.get(name, ()), number)
        weights = {number: layers[number].weight.float().numpy() for number in integers}
        half, signature = replace(context, data=self.decided_on.data), model.signature
        meter = OutputErrorMeter(model.load(), signature, half, "outputs", LAYERS_COMPARED_ON)
        size = context.judged_batch_size(artifact)
        with TemporaryDirectory(prefix="compress-layers-") as folder:
            alone = Path(folder) / "model.onnx"
            for done, (name, own) in enumerate(numbers.items()):
                context.progress(f"layers in {format}", done, len(numbers), name)
                key = f"{format}/{name}"
                if key in known:
                    continue
                if time.monotonic() > deadline:
                    break
                others = [number for number in integers if number not in own]
                write(leave_float(quantized, others, weights), alone)
                predict = accept_any_batch(session_predictor(alone, context.threads), signature)
                predict = predict if size is None else split_batches(predict, size)
                known[key] = meter.measure_predictor(predict).distance ** 2
                write_state(state_file, digest, known)
        losses = {n: known[f"{format}/{n}"] for n in numbers if f"{format}/{n}" in known}
        total = sum(losses.values())
        is_complete = len(losses) == len(numbers)
        scale = whole.loss / total if total and (is_complete or total > whole.loss) else 1.0
        return LayerSensitivity(
            artifact.payload_path,
            {name: numbers[name] for name in losses},
            {name: scale * loss for name, loss in losses.items()},
        )

    def _opener(self, candidate: Candidate) -> Opener:
        context = self.context
        return partial(self.artifact(candidate).open_anew, context.device, context.threads)

    def _compared_with_float(self, file: Opener) -> Comparison:
        context, base = self.context, self._opener(Candidate("float"))
        batches = context.measured_batches(self.model.signature, self.batch)
        compared = compare_latency(base, file, batches, threads=context.threads)
        if compared.speedup_doubt:
            raise NotMeasurable(unmeasurable("the latency", compared.speedup_doubt))
        # Once: the machine's speed drifts, and ratios do not.
        self.base_ms = self.base_ms or compared.before.p50
        return compared

    def artifact(self, candidate: Candidate) -> Artifact:
        """Return the file of a candidate that was built."""
        return Artifact.from_directory(candidate.artifacts(self.out) / candidate.export)

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
    """Run a candidate's pipeline; the evaluator measures all but memory itself."""
    folder = out / CANDIDATES / candidate.name
    folder.mkdir(parents=True, exist_ok=True)
    quiet = replace(
        options,
        cache=out / STORE,
        test=False,
        measured="none" if settings.limits.memory is None else "last",
        announce=lambda line: None,
        finished=lambda report: None,
    )
    return candidate.pipeline(base, settings).run(folder, quiet)
