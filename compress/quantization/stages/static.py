"""The stage that quantizes with ranges calibrated beforehand; settings only, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from compress.common.config import Count
from compress.quantization.config.dtype_scheme import (
    FALSE_IS_OFF,
    Observer,
    Rounding,
    Smoothing,
    WeightBits,
    require_16_bit_kernels,
    scheme_for,
)
from compress.quantization.stages.base import CalibratedStage

if TYPE_CHECKING:
    from torch import nn
    from torch.fx import GraphModule

    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
    from compress.quantization.ptq.calibrate import Corrections, RoundedWeight
    from compress.quantization.stages.base import CalibrationData

SEARCH_BATCH = 8
"""Samples of a batch while corrections are searched: even 16 calibration samples, the fewest that a
stage takes, are then two batches, one to find ranges on and one to measure noise on."""


class QuantizeStatic(CalibratedStage):
    """Compute in 8-bit integers, activation ranges fixed beforehand on a sample of the data.

    The fastest integers on a CPU, and the only ones for convolutions; `train` or other data must
    look like what the model will be given.

        - stage: quantize_static
          observer: percentile
          percentile: 99.9
          calibration_samples: 256
    """

    stage: Literal["quantize_static"] = "quantize_static"
    weight_bits: WeightBits = 8
    """Bits of a weight. 4 are stored so by `export_onnx` and `export_openvino`, and computed as 8;
    in other files they take 8. With 4 or 7 the products are exact in every runtime on x86
    processors without VNNI, which add pairs of them in 16 bits."""
    activation_bits: Literal[8, 16] = 8
    """Bits of an activation; with 16 nearly nothing is lost, and products are taken in floats."""
    observer: Observer = "minmax"
    """How a range is estimated: by extremes (`minmax`), a `moving_average` of each batch's, the
    least squared error (`mse`; `histogram`, torchao's approximation) or the least sum of its cubes
    (`l3`, which clips less), the middle share of values (`percentile`), or the least divergence of
    distributions (`entropy`)."""
    percentile: Annotated[float, Field(gt=50, lt=100)] = 99.99
    """Share of the values that the observer `percentile` keeps, in percent."""
    smooth: Smoothing = "off"
    """SmoothQuant: how far outliers of what linear layers of sequences read are moved into their
    weights, from 0 to 1; `auto` searches each layer's best and leaves alone what gains nothing."""
    equalize: bool = False
    """Whether channels between neighbouring convolutions, with at most a relu between them, are
    brought to one range (cross-layer equalization)."""
    rounding: Rounding = "nearest"
    """`adaround` and `gptq` round each weight up or down so that its layer's outputs stay: the one
    by optimization, worth its time with weights of 4 bits and fewer; the other, with
    `bias_correction`, in closed form within seconds."""
    rounding_steps: Count = 500
    """Optimization steps of `adaround` for each layer."""
    bias_correction: bool = False
    """Whether biases take back the shift of each layer's mean outputs; `adaround` leaves none."""
    corrections: Annotated[Literal["auto", "off"], FALSE_IS_OFF] = "off"
    """`auto` tries `bias_correction`, `observer: l3`, `equalize`, `smooth: auto` and
    `rounding: gptq` one after the other, and keeps what lowers the noise of the outputs on samples
    that no range was found on. The manifest says what was tried; it takes the place of setting
    these by hand, except that another `rounding` than `nearest` may be given and is then kept."""

    @model_validator(mode="after")
    def _check_settings(self) -> QuantizeStatic:
        self.refuse_settings_of_others("observer", {"percentile": ("percentile",)})
        chosen = ("bias_correction", "equalize", "observer", "smooth")
        both = [name for name in chosen if not self.has_default(name)]
        if self.corrections == "auto" and both:
            raise ValueError(
                f"corrections: auto chooses {', '.join(both)} itself, found both; leave out either"
            )
        if self.activation_bits == 16:
            require_16_bit_kernels("activation_bits: 16", self.target, "use 8")
        return self

    @property
    def activation_formats(self) -> frozenset[str]:
        """The target's integers, of `activation_bits`."""
        scheme = scheme_for(self.target, activation_bits=self.activation_bits)
        return frozenset({scheme.activations.dtype})

    def run(self, model: EagerModel | GraphModel, context: Context) -> GraphModel:
        """Calibrate, convert, and save the integer graph."""
        from compress.graph.lifting import program_of_graph
        from compress.quantization.ptq.calibrate import convert

        prepared, quantizer, corrections = self.prepare(model, context)
        program = program_of_graph(convert(prepared), model.signature)
        del prepared  # the float weights, as the model is loaded anew to be compared
        return self.save_integers(model, program, quantizer, {}, context, corrections)

    def prepare(
        self, model: EagerModel | GraphModel, context: Context
    ) -> tuple[GraphModule, OnnxRuntimeQuantizer, Corrections]:
        """Return the graph with calibrated observers, and what quantized and corrected it."""
        from compress.quantization.pt2e.graph_capture import capture

        module = self.load_float(model)
        graph = capture(module, model.signature)
        calibration = self.calibration_data(model, context)
        stage, facts, rounded = self, dict[str, Any](), None
        if self.corrections == "auto":
            stage, facts, rounded = self._with_best_corrections(module, graph, model, calibration)
        report = self.calibration_progress(context)
        # A trial that was chosen has shown what its weights are worth: they are not rounded again.
        prepared, quantizer, corrections = stage.calibrated(
            graph, model, calibration, report, rounded
        )
        corrections.facts |= facts
        return prepared, quantizer, corrections

    def _with_best_corrections(
        self,
        module: nn.Module,
        graph: GraphModule,
        model: EagerModel | GraphModel,
        calibration: CalibrationData,
    ) -> tuple[QuantizeStatic, dict[str, Any], dict[str, RoundedWeight]]:
        """Return the stage with the corrections that gain, what was tried, and GPTQ's weights."""
        from compress.quantization.pt2e.graph_capture import copy_graph, fake_quantized
        from compress.quantization.ptq.calibrate import (
            TrialSamples,
            search_corrections,
            useful_candidates,
        )

        batches = calibration
        if model.signature.batch_axis is not None:
            data = calibration.data.replaced(batch_size=SEARCH_BATCH)
            batches = replace(calibration, data=data)
        samples = TrialSamples.from_batches(batches, calibration.samples)
        ranged: dict[QuantizeStatic, GraphModule] = {}
        rounded: dict[QuantizeStatic, dict[str, RoundedWeight]] = {}

        def quantized(settings: Mapping[str, Any]) -> Callable[..., Any]:
            # AdaRound takes minutes; it runs once, upon what is chosen here.
            fast = {"rounding": "nearest"} if self.rounding == "adaround" else {}
            trial = self.model_copy(update={**fast, **settings})
            # Rounding changes no range: those that were found before are taken again.
            nearest = trial.model_copy(update={"rounding": "nearest", "bias_correction": False})
            if nearest not in ranged:
                ranged[nearest], _, _ = nearest.with_ranges(copy_graph(graph), model, samples.seen)
            prepared = copy_graph(ranged[nearest])
            read = samples.rounding if trial.rounding == "gptq" else samples.seen
            trial.new_corrections().round_(prepared, read, rounded.setdefault(trial, {}))
            # Rounded floats: a converted graph takes five times as long for each activation.
            return fake_quantized(prepared)

        candidates = useful_candidates(graph)
        if not self.has_default("rounding"):
            candidates.remove({"rounding": "gptq"})
        chosen, tried = search_corrections(module, samples.held_out, quantized, candidates)
        stage = self.model_copy(update=chosen)
        facts = {"corrections": chosen, "corrections_tried_db": tried}
        return stage, facts, rounded.get(stage, {})

    def calibrated(
        self,
        graph: GraphModule,
        model: EagerModel | GraphModel,
        batches: Iterable[Batch],
        report: Callable[[int], None] = lambda samples: None,
        rounded: dict[str, RoundedWeight] | None = None,
    ) -> tuple[GraphModule, OnnxRuntimeQuantizer, Corrections]:
        """Return a captured graph with calibrated observers, and what quantized it and how."""
        prepared, quantizer, corrections = self.with_ranges(graph, model, batches, report)
        corrections.round_(prepared, batches, rounded)
        return prepared, quantizer, corrections

    def with_ranges(
        self,
        graph: GraphModule,
        model: EagerModel | GraphModel,
        batches: Iterable[Batch],
        report: Callable[[int], None] = lambda samples: None,
    ) -> tuple[GraphModule, OnnxRuntimeQuantizer, Corrections]:
        """Return the graph with the ranges of activations; its weights and biases are as given."""
        from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
        from compress.quantization.ptq.calibrate import prepare_calibrated

        quantizer = OnnxRuntimeQuantizer(
            scheme_for(self.target, self.weight_bits, self.activation_bits),
            self.observer,
            self.exclude,
            embeddings=self.embeddings,
            percentile=self.percentile,
        )
        corrections = self.new_corrections()
        signature = model.signature
        prepared = prepare_calibrated(graph, signature, quantizer, batches, report, corrections)
        return prepared, quantizer, corrections

    def new_corrections(self) -> Corrections:
        """Return the corrections that are set, of which none is applied yet."""
        from compress.quantization.ptq.calibrate import Corrections

        return Corrections(
            self.smooth, self.equalize, self.rounding, self.rounding_steps, self.bias_correction
        )
