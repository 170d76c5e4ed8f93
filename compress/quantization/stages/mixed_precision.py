"""The stage that quantizes as many layers as the metric allows; settings only, no torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from compress.common.config import Positive
from compress.quantization.config.dtype_scheme import (
    BuiltInObserver,
    Observer,
    require_16_bit_kernels,
    scheme_for,
)
from compress.quantization.stages.base import CalibratedStage
from compress.quantization.stages.static import QuantizeStatic

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context

Fallback = BuiltInObserver | Literal["uint16", "float"]
Correction = Literal["equalize", "smooth", "adaround"]
CORRECTIONS: dict[Correction, dict[str, Any]] = {
    "equalize": {"equalize": True},
    "smooth": {"smooth": "auto"},
    "adaround": {"rounding": "adaround"},
}


class QuantizeMixed(CalibratedStage):
    """Compute in 8-bit integers what the metric allows, and the most sensitive layers in float.

    All layers are quantized first. Where that loses more than `max_drop_points`, the corrections of
    `quantize_static` are tried, which leave every layer in integers. Where none is enough, each
    layer is rounded alone to measure its error; then observers with a smaller error are taken, and
    then layers are put back to float: those first that mend most for what they cost.
    With `uint16` among the fallbacks, layers for which 16-bit activations are enough keep their
    int8 weights.

    Every other sample of `val` decides. The metric of the result on the others, which the search
    does not see, is in the facts beside it (`confirmed_on`). Use it where `quantize_static` loses
    too much and no training is wanted.

        - stage: quantize_mixed
          max_drop_points: 0.5
          fallback: [histogram, uint16, float]
          minutes: 10
    """

    stage: Literal["quantize_mixed"] = "quantize_mixed"
    max_drop_points: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest loss of the metric allowed on the half of `val` that decides, in hundredths of the
    metric (percentage points for accuracy), as `points` of the gate `max_drop`. A larger loss on
    the other half is a warning."""
    observer: Observer = "minmax"
    """How a range is estimated, where the metric is kept so."""
    corrections: tuple[Correction, ...] = ("equalize", "smooth", "adaround")
    """Corrections tried in this order, each by itself, before any layer gets another format: see
    the settings of `quantize_static` (`smooth: auto`, `rounding: adaround`)."""
    fallback: Annotated[tuple[Fallback, ...], Field(min_length=1)] = ("histogram", "float")
    """What a layer may be given instead: another observer of what it reads, `uint16` for 16 bits of
    it beside int8 weights, or `float`. onnxruntime computes such a layer in floats: a quarter of a
    float layer's size, a product about as fast and a convolution slower."""
    sensitivity: Literal["sqnr", "metric"] = "sqnr"
    """What layers are ranked by when rounded alone: noise in the outputs on 64 samples of the half
    of `val` that decides, or the metric on all of it, which takes longer."""
    cost: Literal["macs", "latency"] = "macs"
    """What a layer in float costs: its share of multiply-accumulates, or of the time measured in
    PyTorch, in float and on one sample, which may differ from run to run."""
    minutes: Positive = 30.0
    """Time for the search; the best choice until then that keeps the metric is taken."""

    @model_validator(mode="before")
    @classmethod
    def _limit_is_in_points(cls, settings: Any) -> Any:
        old = settings.get("max_drop") if isinstance(settings, dict) else None
        if old is None:
            return settings
        value = f"{100 * old:g}" if isinstance(old, int | float) else f"100 times {old}"
        raise ValueError(
            f"max_drop: is not in points and has gone; write max_drop_points: {value} for the same "
            "limit, in points as the gate max_drop has it"
        )

    @model_validator(mode="after")
    def _check_fallback(self) -> QuantizeMixed:
        if self.observer in self.fallback:
            raise ValueError(
                f"fallback: {self.observer!r} is the observer of all layers already; name another "
                "one, or float"
            )
        if "uint16" in self.fallback:
            require_16_bit_kernels("fallback: 'uint16'", self.target, "leave it out")
        return self

    @property
    def activation_formats(self) -> frozenset[str]:
        """The target's integers, and 16 bits where a layer may fall back to them."""
        return super().activation_formats | ({"uint16"} & {*self.fallback})

    def run(self, model: EagerModel | GraphModel, context: Context) -> GraphModel:
        """Calibrate, search, and save the graph that keeps the metric."""
        from compress.graph.lifting import program_of_graph
        from compress.quantization.mixed_precision.bit_search import (
            BitSearch,
            CandidateBuilder,
            SensitivityMeter,
            reported,
        )
        from compress.quantization.pt2e.graph_capture import capture, copy_graph
        from compress.quantization.ptq.calibrate import convert

        deadline = time.monotonic() + 60 * self.minutes
        meter = SensitivityMeter(model, context, self.sensitivity)
        graph = capture(self.load_float(model), model.signature)
        scheme = scheme_for(self.target)
        candidates = CandidateBuilder(graph, model.signature, scheme, self.exclude, self.embeddings)
        calibration = self.calibration_data(model, context)
        report = self.calibration_progress(context)

        def calibrate(observer: str) -> None:
            candidates.calibrate(observer, calibration, report)

        calibrate(self.observer)
        samples = [model.signature.example(1)]
        if self.cost == "latency":
            samples = context.measured_batches(model.signature, model.signature.smallest_batch)
        costs = candidates.costs(self.cost, samples)
        search = BitSearch(
            candidates, calibrate, meter, self.max_drop_points, self.fallback, costs, deadline
        )
        tried: dict[str, float | None] = {}
        if search.drop({}) > self.max_drop_points:
            for name in self.corrections:
                if time.monotonic() > deadline:
                    break
                static = QuantizeStatic(
                    target=self.target,
                    observer=self.observer,
                    exclude=self.exclude,
                    embeddings=self.embeddings,
                    **CORRECTIONS[name],
                )
                prepared, quantizer, correction = static.calibrated(
                    copy_graph(graph), model, calibration, report
                )
                program = program_of_graph(convert(prepared), model.signature)
                corrected = program.module(check_guards=False)
                drop = meter.metric_drop(corrected)
                tried[name] = reported(drop)
                if drop <= self.max_drop_points:
                    found = meter.confirm(corrected, self.max_drop_points)
                    found |= search.facts({}) | {"corrections": tried}
                    correction.facts["mixed"] = found
                    return self.save_integers(model, program, quantizer, {}, context, correction)
        formats = search.run()
        chosen, quantizer = candidates.build(formats)
        found = meter.confirm(chosen, self.max_drop_points) | search.facts(formats)
        facts = {
            "mixed": found | {"corrections": tried},
            "vanishing_ranges": candidates.vanishing,
        }
        program = program_of_graph(chosen, model.signature)
        return self.save_integers(model, program, quantizer, facts, context)
