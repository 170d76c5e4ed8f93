"""The stage that quantizes with ranges found at run time; settings only, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count
from compress.core.stage import Stage
from compress.quantization.config.backend_targets import SIGNED_ACTIVATIONS, Target
from compress.quantization.config.calibration_data import Calibration
from compress.quantization.config.dtype_scheme import Smoothing, formats_of, one_backend, scheme_of
from compress.quantization.stages.graph_artifact import check_exclude, save_quantized

if TYPE_CHECKING:
    from compress.core.context import Context

RECURRENT = {"gru", "rnn_tanh", "rnn_relu"}
WITHOUT_KERNEL = {"onnxruntime-cpu": RECURRENT, "inductor-cpu": {*RECURRENT, "lstm"}}
"""Target → operators whose weights are integers and whose products stay float there."""


class QuantizeDynamic(Stage[EagerModel, GraphModel]):
    """Compute linear layers and LSTMs in 8-bit integers, ranges taken anew in each call.

    For transformers and recurrent models: it needs no data and follows inputs of any range. Of GRU
    and RNN, which onnxruntime has no integer kernels for, the weights alone are held in 8 bits.
    Convolutions stay float, for `quantize_static`.
    """

    stage: Literal["quantize_dynamic"] = "quantize_dynamic"
    target: Target = "onnxruntime-cpu"
    """Runtime whose integer kernels decide how numbers are rounded; those on CPUs have such."""
    activation_range: Literal["tensor", "row"] = "tensor"
    """From what an activation's range is taken: the whole call, or each row that a linear layer
    reads. Only with `row` do rows of a batch leave each other's answers alone, so that servers may
    answer requests together; it takes longer, and recurrent layers stay float."""
    embeddings: bool = True
    """Whether tables of embeddings are held in 8 bits too, each row with its own scale."""
    smooth: Smoothing = "off"
    """SmoothQuant: how far outliers of what linear layers read are moved into their weights, from 0
    to 1; `auto` searches each layer's best and leaves alone what gains nothing."""
    calibration_samples: Count = 256
    """Samples that `smooth` looks at."""
    exclude: tuple[str, ...] = ()
    """Names of modules left in float; `*` and `?` stand for any characters."""

    _one_backend = model_validator(mode="before")(one_backend)

    @property
    def needs_data(self) -> bool:
        """Whether activations are looked at beforehand."""
        return self.smooth != "off"

    @property
    def uses_data(self) -> bool:
        """Always: the result is compared on `val`."""
        return True

    @property
    def activation_formats(self) -> frozenset[str]:
        """The target's integers."""
        return formats_of(self.target)

    @model_validator(mode="after")
    def _target_has_run_time_ranges(self) -> QuantizeDynamic:
        if self.target in SIGNED_ACTIVATIONS:
            raise ValueError(
                f"target {self.target} has no kernels for ranges found at run time; use "
                "quantize_static, or target onnxruntime-cpu or inductor-cpu"
            )
        return self

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        """Round the weights, and seal the graph."""
        from compress.quantization.ptq.algorithm_sequence import Corrections
        from compress.quantization.ptq.dynamic_activation import DynamicQuantizer, quantize_dynamic

        module = model.load()
        check_exclude(self.exclude, module)
        quantizer = DynamicQuantizer(
            scheme_of(self.target),
            self.exclude,
            embeddings=self.embeddings,
            by_row=self.activation_range == "row",
        )
        corrections = Corrections(self.smooth, passes_floats=True)
        sample = (
            Calibration.of(self.calibration_samples, model.signature, context)
            if self.needs_data
            else ()
        )
        program = quantize_dynamic(module, model.signature, quantizer, sample, corrections)
        facts = {
            "float_modules": quantizer.float_modules,
            "weights_alone": sorted(WITHOUT_KERNEL[self.target] & quantizer.quantized.keys()),
            **corrections.facts,
        }
        return save_quantized(
            self, model, program, quantizer.quantized, facts, context, corrections.rescaled
        )
