"""The stage that holds weights in a few bits; settings only, no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from compress.artifacts.eager_model import EagerModel
from compress.quantization.config.dtype_scheme import WeightMethod
from compress.quantization.stages.base import FIDELITY, QuantizationStage

if TYPE_CHECKING:
    from compress.artifacts.graph_model import GraphModel
    from compress.artifacts.streaming.packed_model import PackedModel
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.quantization.ptq.weight_only_graph import WeightQuantizer

logger = logging.getLogger(__name__)


class QuantizeWeights(QuantizationStage):
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
    bits: Literal[4, 8] = 4
    """Bits of a weight."""
    group_size: Literal[16, 32, 64, 128, 256] = 32
    """Inputs of a layer that share a scale and a zero point."""
    method: WeightMethod = "rtn"
    """`rtn` rounds to the nearest step, `hqq` also fits the zero points of 4-bit weights, `gptq`
    lets later weights make up for earlier ones' errors on a sample of the data, `awq` scales up
    before rounding what is multiplied with large inputs."""
    symmetric: bool = False
    """Whether zero points lie in the middle of the integers instead of where a group's range has
    them. GGUF's `Q8_0` and `Q4_0` have no others; ONNX files do not store them, and compute faster.
    """
    activation_bits: Literal[8, 32] | None = None
    """Bits of what linear layers multiply with these weights. 8, the default, rounds each
    `group_size` numbers of a row with a scale of their own, as onnxruntime's fast kernel does
    (`MatMulNBits` with `accuracy_level` 4); 32 multiplies floats, as `hqq` always does, whose zero
    points that kernel does not take. Set 32 for `export_aot` and `export_torchscript`, which have
    no such kernel."""
    embeddings: bool = True
    """Whether tables of embeddings are held in few bits too."""
    embedding_bits: Literal[4, 8] = 8
    """Bits of a table's numbers. With 8 each row has a scale; with 4 each 64 numbers of a row have
    one (32 or 16 where 64 do not divide it), and ONNX files look them up by
    `GatherBlockQuantized`."""

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
        return self.method in ("gptq", "awq")

    def run(self, model: EagerModel | GraphModel, context: Context) -> GraphModel:
        """Quantize the weights, and save the graph."""
        from compress.quantization.ptq.weight_only_graph import WeightQuantizer, quantize_weights

        quantizer = WeightQuantizer(
            self.method,
            self.bits,
            self.group_size,
            self.embeddings,
            self.exclude,
            embedding_bits=self.embedding_bits,
            round_activations=self.activation_bits != 32 and self.method != "hqq",
            symmetric=self.symmetric,
        )
        sample = self.calibration_data(model, context) if self.needs_data else ()
        if isinstance(model, EagerModel) and model.is_streamed:
            return self._run_streamed(model, quantizer, sample, context)
        module = self.load_float(model)
        program = quantize_weights(module, model.signature, quantizer, sample)
        facts: dict[str, Any] = {"left_float": quantizer.left_float}
        if self.method == "awq":
            facts["scaled"] = quantizer.scaled
        counts, rescaled = quantizer.quantized, quantizer.rescaled
        return self.save_graph(model, program, counts, facts, context, rescaled)

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
        facts: dict[str, Any] = {
            "quantized_operators": dict(sorted(quantizer.quantized.items())),
            "left_float": quantizer.left_float,
            ROUNDS: quantizer.round_activations,
        }
        if self.method == "awq":
            facts["scaled"] = quantizer.scaled
        module = packed_module(model.recipe, state, rounds=quantizer.round_activations)
        with (
            model.open(threads=context.threads) as expected,
            torch_predictor(module, "cpu", context.threads) as predict,
        ):
            fidelity = compare_outputs(expected, predict, model.signature, context)
        facts[FIDELITY] = fidelity.model_dump(mode="json")
        logger.info("%s: quantized %s", self.title, facts["quantized_operators"])
        logger.info("%s: %s", self.title, fidelity.line())
        return PackedModel.create_packed(
            context.root, model, state, lineage=self.lineage(model), facts=facts
        )
