"""Dynamic quantization: integer weights, activation ranges computed in each call."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_token and its inverse

from compress.common.errors import StageFailed
from compress.graph.torch_export import export_program
from compress.quantization.pt2e.graph_capture import capture, is_excluded
from compress.quantization.pt2e.quantizer import (
    EMBEDDING,
    LINEAR,
    SMALLEST_SCALE,
    OnnxRuntimeQuantizer,
    find_float_modules,
    is_constant,
    is_float,
)
from compress.quantization.pt2e.torchao_api import (
    PlaceholderObserver,
    QuantizationSpec,
    prepare_pt2e,
)
from compress.quantization.ptq.calibrate import convert

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import IntegerFormat, Scheme
    from compress.quantization.ptq.calibrate import Corrections

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
LARGEST = 127
"""Largest integer of a row; ranges are symmetric, so that all rows have the zero point 0."""
ROW_RANGE = (-LARGEST, LARGEST, torch.int8)
EXTREMES = (-128, 127, torch.int8)
"""The integers of rows with zero points."""


class DynamicQuantizer(OnnxRuntimeQuantizer):
    """Annotates linear and recurrent layers, and embeddings; convolutions stay float."""

    # onnxruntime's integer convolution with run-time ranges is far slower than its float one.

    def __init__(
        self, scheme: Scheme, exclude: Sequence[str] = (), *, embeddings: bool, by_row: bool = False
    ) -> None:
        """Choose the formats; with `by_row` each row of an activation has a range of its own."""
        super().__init__(scheme, "minmax", exclude, embeddings=embeddings)
        self.by_row = by_row
        options: dict[str, Any] = {
            "dtype": getattr(torch, scheme.activations.dtype),
            "quant_min": scheme.activations.quant_min,
            "quant_max": scheme.activations.quant_max,
            "qscheme": torch.per_tensor_affine,
            "is_dynamic": True,
        }
        observer = PlaceholderObserver.with_args(eps=SMALLEST_SCALE, **options)
        self.activation = QuantizationSpec(observer_or_fake_quant_ctr=observer, **options)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the operators to be quantized, in graph order."""
        for node in model.graph.nodes:
            if node.op != "call_function" or is_excluded(node, self.exclude):
                continue
            if node.target is LINEAR and is_float(node.args[0]) and is_constant(node.args[1]):
                source, weight = node.args[:2]
                self._annotate_inputs(node, {source: self.activation, weight: self.weight})
            elif node.target is EMBEDDING:
                self._annotate_embedding(node)
            # Integer kernels of recurrent layers take one range for all rows.
            elif node.target in RECURRENT and not self.by_row:
                matrices = [w for w in node.args[2] if w.meta["val"].dim() == 2]
                if all(is_constant(w) and is_float(w) for w in matrices):
                    self._annotate_inputs(node, dict.fromkeys(matrices, self.weight))
        self.float_modules = find_float_modules(model)
        return model


def quantize_dynamic(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: DynamicQuantizer,
    batches: Iterable[Batch],
    corrections: Corrections,
) -> ExportedProgram:
    """Return the module as a graph with integer weights and ranges found at run time.

    The module, in eval mode, is not changed; `batches` are read for SmoothQuant. StageFailed where
    nothing can be quantized.
    """
    graph = capture(module, signature)
    corrections.smooth_(graph, batches, quantizer.scheme, quantizer.exclude)
    prepared = prepare_pt2e(graph, quantizer)
    if not quantizer.quantized:
        raise StageFailed(
            "no operator could be quantized; expected a float32 linear or recurrent layer or an "
            "embedding that `exclude` does not name; for convolutions use quantize_static"
        )
    with torch.inference_mode():
        prepared(*signature.example())  # observers of weights see them only when the graph runs
    integers = convert(prepared)
    if quantizer.by_row:
        scale_rows_(integers, quantizer.scheme.activations)
    return export_program(integers, signature)


def scale_rows_(graph: GraphModule, activations: IntegerFormat) -> None:
    """Replace the range of a whole activation by one for each row, so that rows are independent.

    A row is what the last axis holds, over which a linear layer sums. Signed activations with a
    zero point get a row's extremes, as XNNPACK's kernels take them; others its largest magnitude.
    """
    call = graph.graph.call_function
    has_zero_points = activations.dtype == "int8" and not activations.symmetric
    has_zero_points = activations.dtype == "int8" and not activations.symmetric
    least, most, dtype = EXTREMES if has_zero_points else ROW_RANGE
    for qparams in graph.graph.find_nodes(
        op="call_function", target=decomposed.choose_qparams.tensor
    ):
        source = qparams.args[0]
        with graph.graph.inserting_before(qparams):
            if has_zero_points:
                rows = decomposed.choose_qparams_per_token_asymmetric.default
                both = call(rows, (source, torch.int8))
                scale, zero = (call(operator.getitem, (both, i)) for i in (0, 1))
            else:
                largest = call(aten.amax.default, (call(aten.abs.default, (source,)), [-1], True))
                scale = call(aten.mul.Tensor, (largest, 1 / LARGEST))
                scale = call(aten.clamp_min.default, (scale, SMALLEST_SCALE))
                zero = call(aten.zeros_like.default, (scale,))
        per_tensor = decomposed.quantize_per_tensor.tensor
        readers = [node for node in source.users if node.target is per_tensor]
        for quantize in [node for node in readers if node.args[1].args[:1] == (qparams,)]:
            with graph.graph.inserting_before(quantize):
                integers = call(
                    decomposed.quantize_per_token.default, (source, scale, zero, least, most, dtype)
                )
            for dequantize in list(quantize.users):
                with graph.graph.inserting_before(dequantize):
                    floats = call(
                        decomposed.dequantize_per_token.default,
                        (integers, scale, zero, least, most, dtype, torch.float32),
                    )
                floats.meta |= {k: v for k, v in dequantize.meta.items() if k != "val"}
                dequantize.replace_all_uses_with(floats)
                graph.graph.erase_node(dequantize)
    graph.graph.eliminate_dead_code()
    graph.recompile()
