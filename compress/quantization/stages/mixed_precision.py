"""The stage that quantizes as many layers as the metric allows; settings only, no torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Positive
from compress.core.stage import Stage
from compress.quantization.config.backend_targets import Target
from compress.quantization.config.calibration_data import Calibration
from compress.quantization.config.dtype_scheme import Observer, formats_of, scheme_of
from compress.quantization.stages.graph_artifact import check_exclude, save_quantized

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.core.context import Context
    from compress.quantization.mixed_precision.bit_candidates import Candidates

Fallback = Observer | Literal["uint16", "float"]


class QuantizeMixed(Stage[EagerModel, GraphModel]):
    """Compute in 8-bit integers what the metric allows, and the most sensitive layers in float.

    All layers are quantized first. Where that loses more than `max_drop_points`, each layer is
    rounded alone to see what it does; then observers that do less harm are taken, which cost no
    speed, and then layers are put back to float: those first that mend most for what they cost.
    With `uint16` among the fallbacks, layers for which 16-bit activations are enough keep their
    int8 weights.
    """

    stage: Literal["quantize_mixed"] = "quantize_mixed"
    max_drop_points: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest loss of the metric on `val` allowed, in hundredths of the metric (percentage points
    for accuracy), as `points` of the gate `max_drop`."""
    target: Target = "onnxruntime-cpu"
    """Runtime whose fused integer kernels decide which operators are quantized, and how."""
    calibration_samples: Annotated[int, Field(ge=16)] = 512
    """Samples on which the ranges of activations are observed; fewer than 16 tell too little."""
    observer: Observer = "minmax"
    """How a range is estimated, where the metric is kept so."""
    fallback: Annotated[tuple[Fallback, ...], Field(min_length=1)] = ("histogram", "float")
    """What a layer may be given instead: another observer of what it reads, `uint16` for 16 bits of
    it beside int8 weights, or `float`. onnxruntime computes such a layer in floats: a quarter of a
    float layer's size, a product about as fast and a convolution slower."""
    sensitivity: Literal["sqnr", "metric"] = "sqnr"
    """What layers are ranked by when rounded alone: noise in the outputs on 64 samples of `val`, or
    the metric on all of it, which takes longer."""
    cost: Literal["macs", "latency"] = "macs"
    """What a layer in float costs: its share of multiply-accumulates, or of the time measured in
    PyTorch, in float and on one sample, which may differ from run to run."""
    minutes: Positive = 30.0
    """Time for the search; the best choice until then that keeps the metric is taken."""
    embeddings: bool = True
    """Whether tables of embeddings are held in 8 bits too, each row with its own scale."""
    exclude: tuple[str, ...] = ()
    """Names of modules left in float anyway; `*` and `?` stand for any characters."""

    @model_validator(mode="before")
    @classmethod
    def _is_in_points(cls, settings: Any) -> Any:
        old = settings.get("max_drop") if isinstance(settings, dict) else None
        if old is None:
            return settings
        value = f"{100 * old:g}" if isinstance(old, int | float) else f"100 times {old}"
        raise ValueError(
            f"max_drop: is not in points and has gone; write max_drop_points: {value} for the same "
            "limit, in points as the gate max_drop has it"
        )

    @model_validator(mode="after")
    def _fallback_is_another(self) -> QuantizeMixed:
        if self.observer in self.fallback:
            raise ValueError(
                f"fallback: {self.observer!r} is the observer of all layers already; name another "
                "one, or float"
            )
        return self

    @model_validator(mode="after")
    def _sixteen_bits_have_a_zero_point(self) -> QuantizeMixed:
        if "uint16" in self.fallback and self.target != "onnxruntime-cpu":
            raise ValueError(
                f"fallback: 'uint16' is for target: onnxruntime-cpu, found {self.target}, which "
                "has no kernel that reads 16 bits; leave it out"
            )
        return self

    @property
    def needs_data(self) -> bool:
        """Always."""
        return True

    @property
    def activation_formats(self) -> frozenset[str]:
        """The target's integers, and 16 bits where a layer may fall back to them."""
        return formats_of(self.target) | ({"uint16"} & {*self.fallback})

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Calibrate, search, and seal the graph that keeps the metric."""
        from compress.graph.torch_export import export_program
        from compress.quantization.mixed_precision.bit_search import Search
        from compress.quantization.mixed_precision.sensitivity import SensitivityMeter

        deadline = time.monotonic() + 60 * self.minutes
        judge = SensitivityMeter(model, context, self.sensitivity)
        candidates, observe = self._candidates(model, context)
        observe(self.observer)
        asked = [model.signature.example(1)]
        if self.cost == "latency":
            asked = context.measured_batches(model.signature, model.signature.smallest_batch)
        costs = candidates.costs(self.cost, asked)
        search = Search(
            candidates, observe, judge, self.max_drop_points, self.fallback, costs, deadline
        )
        formats = search.run()
        found = candidates.build(formats)
        program = export_program(found.graph, model.signature)
        facts = {"float_modules": found.quantizer.float_modules, "mixed": search.facts(formats)}
        return save_quantized(self, model, program, found.quantizer.quantized, facts, context)

    def _candidates(
        self, model: EagerModel, context: Context
    ) -> tuple[Candidates, Callable[[str], None]]:
        """Trace the model; return also what calibrates it with an observer."""
        from compress.quantization.mixed_precision.bit_candidates import Candidates

        module = model.load()
        check_exclude(self.exclude, module)
        candidates = Candidates.of(
            module,
            model.signature,
            scheme_of(self.target),
            self.exclude,
            embeddings=self.embeddings,
        )
        calibration = Calibration.of(self.calibration_samples, model.signature, context)

        def report(seen: int) -> None:
            context.progress("calibrate", seen, self.calibration_samples)

        return candidates, lambda observer: candidates.observe(observer, calibration, report)
