"""The stage that holds weights in a few bits; settings only, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from compress.artifacts.eager_model import EagerModel
from compress.quantization.config.dtype_scheme import WeightFormat
from compress.quantization.stages.base import QuantizationStage

if TYPE_CHECKING:
    from compress.artifacts.graph_model import GraphModel
    from compress.artifacts.streaming.packed_model import PackedModel
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.quantization.ptq.weight_only_graph import WeightQuantizer


class QuantizeWeights(WeightFormat, QuantizationStage):
    """Hold the weights of linear layers in a few bits, for a small file and little memory.

    Latency falls where reading weights takes the time, such as with one row in a call: for decoders
    and other large linear layers.

        - stage: quantize_weights
          bits: 4
          method: gptq
          group_size: 32
    """

    stage: Literal["quantize_weights"] = "quantize_weights"
    streams: ClassVar[bool] = True
    # The number with which GPTQ and AWQ were published (arXiv 2210.17323, 2306.00978).
    default_samples: ClassVar[int] = 128

    @model_validator(mode="after")
    def _hqq_has_kernels(self) -> QuantizeWeights:
        if self.method == "hqq" and self.bits != 4:
            # onnxruntime 1.31 has no 8-bit product with zero points between two integers.
            raise ValueError(f"method hqq is for bits: 4, found bits: {self.bits}; use rtn or gptq")
        if self.method == "hqq" and self.symmetric:
            raise ValueError("method hqq fits zero points, found symmetric: true; use rtn or gptq")
        if self.method == "hqq" and self.activation_bits == 8:
            raise ValueError(
                "method hqq multiplies floats, found activation_bits: 8; leave it out or use gptq"
            )
        return self

    @property
    def needs_data(self) -> bool:
        """Whether the method looks at data."""
        return self.calibrates

    def run(self, model: EagerModel | GraphModel, context: Context) -> GraphModel:
        """Quantize the weights, and save the graph."""
        from compress.quantization.ptq.weight_only_graph import WeightQuantizer, quantize_weights

        quantizer = WeightQuantizer(self, self.exclude)
        sample = self.calibration_data(model, context) if self.needs_data else ()
        if isinstance(model, EagerModel) and model.is_streamed:
            return self._run_streamed(model, quantizer, sample, context)
        module = self.load_float(model)
        program = quantize_weights(module, model.signature, quantizer, sample)
        del module  # its weights, as the model is loaded anew to be compared
        counts, rescaled = quantizer.quantized, quantizer.rescaled
        return self.save_graph(model, program, counts, quantizer.facts(), context, rescaled)

    def _run_streamed(
        self,
        model: EagerModel,
        quantizer: WeightQuantizer,
        sample: Iterable[Batch],
        context: Context,
    ) -> PackedModel:
        from compress.artifacts.streaming.packed_model import ROUNDS, PackedModel, packed_module
        from compress.common.forward import torch_predictor
        from compress.quantization.numeric_debug.compare import compare_outputs
        from compress.quantization.ptq.streamed_weights import StreamedQuantization

        self.refuse_unknown_names(model.stored_weights()[0])
        streamed = StreamedQuantization(model, quantizer, sample, context.work / "streamed")
        state = streamed.run(context.progress)
        module = packed_module(model.recipe, state, rounds=self.rounds_activations)
        with (
            model.open(threads=context.threads) as expected,
            torch_predictor(module, "cpu", context.threads) as predict,
        ):
            fidelity = compare_outputs(expected, predict, model.signature, context)
        own = {**quantizer.facts(), ROUNDS: self.rounds_activations}
        facts = self.recorded(quantizer.quantized, own, fidelity)
        return PackedModel.create_packed(
            context.root, model, state, lineage=self.lineage(model), facts=facts
        )
