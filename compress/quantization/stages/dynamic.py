"""The stage that quantizes with ranges found at run time; settings only, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from compress.quantization.config.dtype_scheme import (
    SIGNED_ACTIVATIONS,
    Smoothing,
    Target,
    scheme_for,
)
from compress.quantization.stages.base import IntegerStage

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context

GRU_AND_RNN = {"gru", "rnn_tanh", "rnn_relu"}
WEIGHT_ONLY_KERNELS: dict[str, set[str]] = {
    "onnxruntime-cpu": GRU_AND_RNN,
    "inductor-cpu": {*GRU_AND_RNN, "lstm"},
    "xnnpack": set(),
}
"""Target → operators without an integer kernel: int8 weights, multiplied in float."""


class QuantizeDynamic(IntegerStage):
    """Compute linear layers and LSTMs in 8-bit integers, ranges taken anew in each call.

    For transformers and recurrent models: it needs no data and follows inputs of any range. Of GRU
    and RNN, which onnxruntime has no integer kernels for, the weights alone are held in 8 bits.
    Convolutions stay float, for `quantize_static`.

        - stage: quantize_dynamic
          activation_range: row
          exclude: [classifier]
    """

    stage: Literal["quantize_dynamic"] = "quantize_dynamic"
    default_samples: ClassVar[int] = 256
    target: Target = "onnxruntime-cpu"
    """Runtime whose integer kernels decide how numbers are rounded; those on CPUs have such."""
    weight_bits: Literal[7, 8] = 8
    """Bits of a weight, which takes 8 in the file. With 7 the products are exact in every runtime
    on x86 processors without VNNI, which add pairs of them in 16 bits, and onnxruntime takes its
    faster kernels there."""
    activation_range: Literal["tensor", "row"] | None = None
    """From what an activation's range is taken: the whole call (`tensor`, the default), or each row
    that a linear layer reads. Only with `row` are a row's outputs independent of the other rows of
    the batch, so that servers may batch requests; it takes longer, and recurrent layers stay float.
    With `target: xnnpack` it is always `row`."""
    smooth: Smoothing = "off"
    """SmoothQuant: how far outliers of what linear layers read are moved into their weights, from 0
    to 1; `auto` searches each layer's best and leaves alone what gains nothing."""

    @property
    def needs_data(self) -> bool:
        """Whether `smooth` looks at activations."""
        return self.smooth != "off"

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target == "xnnpack" and self.activation_range == "tensor":
            raise ValueError(
                "activation_range: XNNPACK takes a range for each row, found tensor; leave it out"
            )
        if self.target in SIGNED_ACTIVATIONS:
            raise ValueError(
                f"target {self.target} has no kernels for ranges found at run time; use "
                "quantize_static, or target onnxruntime-cpu, inductor-cpu or xnnpack"
            )
        return self

    def run(self, model: EagerModel | GraphModel, context: Context) -> GraphModel:
        """Quantize the weights, and save the graph."""
        from compress.quantization.ptq.calibrate import (
            Corrections,
            DynamicQuantizer,
            quantize_dynamic,
        )

        quantizer = DynamicQuantizer(
            scheme_for(self.target, self.weight_bits),
            self.exclude,
            embeddings=self.embeddings,
            by_row=self.target == "xnnpack" or self.activation_range == "row",
        )
        corrections = Corrections(self.smooth, float_between_layers=True)
        sample = self.calibration_data(model, context) if self.needs_data else ()
        module = self.load_float(model)
        program = quantize_dynamic(module, model.signature, quantizer, sample, corrections)
        del module  # its weights, as the model is loaded anew to be compared
        weight_only = WEIGHT_ONLY_KERNELS[self.target] & quantizer.quantized.keys()
        facts = {"weights_alone": sorted(weight_only)}
        return self.save_integers(model, program, quantizer, facts, context, corrections)
