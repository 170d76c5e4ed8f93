"""Evaluate the input of one layer of a prepared graph: in float, and fake-quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compress.quantization.pt2e.graph_constants import value_of
from compress.quantization.pt2e.quantizer import is_constant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from compress.data.batch import Batch


class LayerInputs:
    """The inputs of a prepared graph's layers, while its weights are replaced one after another."""

    def __init__(self, prepared: fx.GraphModule, batches: Iterable[Batch]) -> None:
        """Remember the current weights as those of the float model; observers are not updated."""
        constants = [node for node in prepared.graph.nodes if node.op == "get_attr"]
        self._float_weights = {str(node.target): value_of(prepared, node) for node in constants}
        self._prepared = prepared
        # Read again for each layer, so that memory does not grow with the sample.
        self._batches = batches

    @torch.no_grad()
    def pairs(self, layer: fx.Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a layer's input for each batch: the float model's, and the quantized one's.

        In the second everything before the layer is fake-quantized, with the current weights.
        """
        in_float = _InputInterpreter(self._prepared, layer, self._float_weights)
        quantized = _InputInterpreter(self._prepared, layer, None)
        for batch in self._batches:
            yield in_float.evaluate(*batch.inputs), quantized.evaluate(*batch.inputs)


class _InputInterpreter(fx.Interpreter):
    """Evaluates a layer's first input: fake-quantized, or where weights are given with these."""

    def __init__(
        self,
        prepared: fx.GraphModule,
        layer: fx.Node,
        float_weights: dict[str, torch.Tensor] | None,
    ) -> None:
        super().__init__(prepared)
        self._float_weights = float_weights
        self._source: Any = layer.args[0]
        self._needed: set[fx.Node] = set()
        pending: list[Any] = [self._source]
        while pending:
            node = pending.pop()
            if node not in self._needed:
                self._needed.add(node)
                pending += node.all_input_nodes
        self._quantized_weights: dict[fx.Node, torch.Tensor] = {}
        self._result: Any = None

    def evaluate(self, *inputs: torch.Tensor) -> torch.Tensor:
        # Nothing is unflattened: nodes behind the source, the output among them, give None.
        self.run(*inputs, enable_io_processing=False)
        result: torch.Tensor = self._result
        return result

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._needed and n.op != "placeholder":
            return None
        if n.op == "get_attr" and self._float_weights is not None:
            value = self._float_weights[str(n.target)]
        elif n.op != "call_module":
            value = super().run_node(n)
        elif n in self._quantized_weights:
            value = self._quantized_weights[n]
        else:
            (value,), _ = self.fetch_args_kwargs_from_env(n)
            if self._float_weights is None:
                value = fake_quantize(self.module.get_submodule(str(n.target)), value)
                if is_constant(n.args[0]):
                    self._quantized_weights[n] = value  # equal for all batches
        if n is self._source:
            self._result = value
        return value


def fake_quantize(observer: Any, value: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize a tensor with an observer's scale and zero point."""
    shape = (-1, *[1] * (value.dim() - 1))
    scale, zero = (part.view(shape) for part in observer.calculate_qparams())
    low, high = observer.quant_min, observer.quant_max
    rounded: torch.Tensor = ((value / scale + zero).round().clamp(low, high) - zero) * scale
    return rounded
