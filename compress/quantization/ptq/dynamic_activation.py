"""Integer weights beside activations whose ranges are taken anew in each call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.common.errors import StageFailed
from compress.graph.torch_export import export_program
from compress.quantization.pt2e.module_names import is_excluded
from compress.quantization.pt2e.qspec import SMALLEST_SCALE
from compress.quantization.pt2e.quantizer import (
    EMBEDDING,
    LINEAR,
    OnnxRuntimeQuantizer,
    float_modules,
    is_constant,
    is_float,
)
from compress.quantization.pt2e.torchao_api import (
    PlaceholderObserver,
    QuantizationSpec,
    prepare_pt2e,
)
from compress.quantization.ptq.calibrate import integer_graph, traced
from compress.quantization.ptq.row_ranges import scale_rows_

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import IntegerFormat, Scheme
    from compress.quantization.ptq.algorithm_sequence import Corrections

aten = torch.ops.aten
RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}


class DynamicQuantizer(OnnxRuntimeQuantizer):
    """Annotates linear and recurrent layers, and tables of embeddings; convolutions stay float.

    onnxruntime's integer convolution with run-time ranges is far slower than its float one.
    """

    def __init__(
        self,
        scheme: Scheme,
        exclude: Sequence[str] = (),
        *,
        embeddings: bool,
        by_row: bool = False,
    ) -> None:
        """Choose the formats.

        Args:
            scheme: integer formats of activations and weights.
            exclude: patterns of module names whose operators stay float.
            embeddings: whether tables are rounded too, each row with a scale of its own.
            by_row: whether each row of an activation has a range of its own; recurrent layers then
                stay float, as their integer kernel takes one range for all rows.
        """
        super().__init__(scheme, "minmax", exclude, embeddings=embeddings)
        self.by_row = by_row
        self.activation = _run_time_spec(scheme.activations)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Mark the operators to be quantized, in graph order."""
        for node in model.graph.nodes:
            if node.op == "call_function" and not is_excluded(node, self.exclude):
                if node.target is LINEAR and is_float(node.args[0]) and is_constant(node.args[1]):
                    self._weights_of(
                        node, {node.args[0]: self.activation, node.args[1]: self.weight}
                    )
                elif node.target is EMBEDDING:
                    self._annotate_table(node)
                elif node.target in RECURRENT and not self.by_row:
                    matrices = [w for w in node.args[2] if w.meta["val"].dim() == 2]
                    if all(is_constant(w) and is_float(w) for w in matrices):
                        self._weights_of(node, dict.fromkeys(matrices, self.weight))
        self.float_modules = float_modules(model)
        return model


def quantize_dynamic(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: DynamicQuantizer,
    batches: Iterable[Batch] = (),
    corrections: Corrections | None = None,
) -> ExportedProgram:
    """Return the module as a graph with integer weights and ranges found at run time.

    Args:
        module: a module in eval mode; it is not changed.
        signature: its interface.
        quantizer: which operators are quantized, and how.
        batches: inputs, for smoothing.
        corrections: whether outliers of activations are smoothed.

    Raises:
        StageFailed: nothing can be quantized.
    """
    graph = traced(module, signature)
    if corrections is not None:
        corrections.smooth_(graph, batches, quantizer.scheme, quantizer.exclude)
    prepared = prepare_pt2e(graph, quantizer)
    if not quantizer.quantized:
        raise StageFailed(
            "no operator could be quantized; expected a float32 linear or recurrent layer or an "
            "embedding that `exclude` does not name; for convolutions use quantize_static"
        )
    with torch.inference_mode():
        prepared(*signature.example())  # the weights' observers look when the model is run
    integers = integer_graph(prepared)
    if quantizer.by_row:
        scale_rows_(integers)
    return export_program(integers, signature)


def _run_time_spec(numbers: IntegerFormat) -> QuantizationSpec:
    dtype = getattr(torch, numbers.dtype)
    observer = PlaceholderObserver.with_args(
        dtype=dtype,
        quant_min=numbers.low,
        quant_max=numbers.high,
        qscheme=torch.per_tensor_affine,
        is_dynamic=True,
        eps=SMALLEST_SCALE,
    )
    return QuantizationSpec(
        dtype=dtype,
        observer_or_fake_quant_ctr=observer,
        quant_min=numbers.low,
        quant_max=numbers.high,
        qscheme=torch.per_tensor_affine,
        is_dynamic=True,
    )
