"""The stage that quantizes with ranges fixed beforehand; settings only, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count
from compress.core.stage import Stage
from compress.quantization.config.backend_targets import Target
from compress.quantization.config.calibration_data import Calibration
from compress.quantization.config.dtype_scheme import (
    ActivationBits,
    Observer,
    Rounding,
    Smoothing,
    WeightBits,
    formats_of,
    one_backend,
    scheme_of,
)
from compress.quantization.stages.graph_artifact import check_exclude, save_quantized

if TYPE_CHECKING:
    from compress.core.context import Context


class QuantizeStatic(Stage[EagerModel, GraphModel]):
    """Compute in 8-bit integers, activation ranges fixed beforehand on a sample of the data."""

    stage: Literal["quantize_static"] = "quantize_static"
    target: Target = "onnxruntime-cpu"
    """Runtime whose fused integer kernels decide which operators are quantized, and how."""
    weight_bits: WeightBits = 8
    """Bits of a weight; 4-bit ones are held in 8, so they make nothing smaller or faster here."""
    activation_bits: ActivationBits = 8
    """Bits of an activation; with 16 nearly nothing is lost, and products are taken in floats."""
    calibration_samples: Annotated[int, Field(ge=16)] = 512
    """Samples on which the ranges of activations are observed; fewer than 16 tell too little."""
    observer: Observer = "minmax"
    """How a range is estimated: by extremes (`minmax`), a `moving_average` of each batch's, the
    least squared error (`mse`; `histogram`, torchao's approximation), the middle share of values
    (`percentile`), or the least divergence of distributions (`entropy`)."""
    percentile: Annotated[float, Field(gt=50, lt=100)] = 99.99
    """Share of the values that the observer `percentile` keeps, in percent."""
    embeddings: bool = True
    """Whether tables of embeddings are held in 8 bits too, each row with its own scale."""
    smooth: Smoothing = "off"
    """SmoothQuant: how far outliers of what linear layers of sequences read are moved into their
    weights, from 0 to 1; `auto` searches each layer's best and leaves alone what gains nothing."""
    equalize: bool = False
    """Whether channels between neighbouring convolutions, with at most a relu between them, are
    brought to one range (cross-layer equalization)."""
    rounding: Rounding = "nearest"
    """`adaround` rounds each weight up or down so that its layer's answers stay; worth its time
    with weights of 4 bits and fewer."""
    rounding_steps: Count = 500
    """Optimization steps of `adaround` for each layer."""
    bias_correction: bool = False
    """Whether biases take back the shift of each layer's mean answers; `adaround` leaves none."""
    exclude: tuple[str, ...] = ()
    """Names of modules left in float; `*` and `?` stand for any characters."""

    _one_backend = model_validator(mode="before")(one_backend)

    @model_validator(mode="after")
    def _percentile_has_its_observer(self) -> QuantizeStatic:
        if "percentile" in self.model_fields_set and self.observer != "percentile":
            raise ValueError(
                f"percentile is for observer: percentile, found observer: {self.observer}; "
                "set that or leave percentile out"
            )
        return self

    @model_validator(mode="after")
    def _sixteen_bits_have_a_zero_point(self) -> QuantizeStatic:
        if self.activation_bits == 16 and self.target != "onnxruntime-cpu":
            raise ValueError(
                f"activation_bits: 16 is for target: onnxruntime-cpu, found {self.target}, which "
                "has no kernel that reads 16 bits; use 8"
            )
        return self

    @property
    def needs_data(self) -> bool:
        """Always."""
        return True

    @property
    def activation_formats(self) -> frozenset[str]:
        """The target's integers, of as many bits as are asked for."""
        return formats_of(self.target, self.activation_bits)

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Calibrate, round, and seal the integer graph."""
        from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
        from compress.quantization.ptq.algorithm_sequence import Corrections
        from compress.quantization.ptq.calibrate import quantize

        module = model.load()
        check_exclude(self.exclude, module)
        quantizer = OnnxRuntimeQuantizer(
            scheme_of(self.target, self.weight_bits, self.activation_bits),
            self.observer,
            self.exclude,
            embeddings=self.embeddings,
            percentile=self.percentile,
        )
        corrections = Corrections(
            self.smooth, self.equalize, self.rounding, self.rounding_steps, self.bias_correction
        )

        def report(seen: int) -> None:
            context.progress("calibrate", seen, self.calibration_samples)

        calibration = Calibration.of(self.calibration_samples, model.signature, context)
        program = quantize(module, model.signature, quantizer, calibration, report, corrections)
        facts = {
            "float_modules": quantizer.float_modules,
            **quantizer.ranges,
            **corrections.facts,
        }
        return save_quantized(
            self, model, program, quantizer.quantized, facts, context, corrections.rescaled
        )
