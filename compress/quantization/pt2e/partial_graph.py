"""Evaluate the inputs of a prepared graph's layers, in turn: in float, and fake-quantized."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import fx

from compress.quantization.pt2e.graph_capture import value_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from compress.data.batch import Batch

    Values = dict[fx.Node, Any]


class LayerInputs:
    """The inputs of a prepared graph's layers, while its weights are replaced one after another.

    A context manager. The graph is evaluated once: layers are asked for in graph order, and what
    later nodes read is kept until then in a temporary folder, so that memory does not grow with the
    sample.
    """

    def __init__(self, prepared: fx.GraphModule, batches: Iterable[Batch]) -> None:
        """Remember the current weights as those of the float model; observers are not updated."""
        self._nodes = list(prepared.graph.nodes)
        self._index = {node: i for i, node in enumerate(self._nodes)}
        self._constant: set[fx.Node] = set()
        for node in self._nodes:
            if node.op != "placeholder" and self._constant.issuperset(node.all_input_nodes):
                self._constant.add(node)
        weights = {n.target: value_of(prepared, n) for n in self._nodes if n.op == "get_attr"}
        self._models = tuple(_Interpreter(prepared, self._constant, w) for w in (weights, None))
        self._batches = batches
        self._files: list[Path] = []
        self._evaluated = 0
        """Number of nodes, in graph order, that are evaluated."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="layer-inputs-")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @torch.no_grad()
    def pairs(self, layer: fx.Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield a layer's input for each batch: the float model's, and the quantized one's.

        In the second everything before the layer is fake-quantized, with the weights that the
        layers before have now. Layers before may not be replaced afterwards.
        """
        source: Any = layer.args[0]
        self._evaluate(self._index[source] + 1)
        for file in self._files:
            both = zip(self._models, self._read(file), strict=True)
            in_float, quantized = (model.value(source, values) for model, values in both)
            yield in_float, quantized

    def _evaluate(self, count: int) -> None:
        """Evaluate the first nodes, for each batch."""
        if not self._files:
            inputs = [node for node in self._nodes if node.op == "placeholder"]
            for i, batch in enumerate(self._batches):
                self._files.append(Path(self._folder.name) / f"{i}.pt")
                values = dict(zip(inputs, batch.inputs, strict=True))
                self._write(self._files[-1], [values, values])
        # Weights are read when they are used: the layer's own may be replaced until then.
        todo = [
            node
            for node in self._nodes[self._evaluated : count]
            if node.op != "placeholder" and node not in self._constant
        ]
        if not todo:
            return
        self._evaluated = count
        for model in self._models:
            model.constants.clear()
        for file in self._files:
            both = self._read(file)
            for model, values in zip(self._models, both, strict=True):
                for node in todo:
                    values[node] = model.evaluate(node, values)
            self._write(file, both)

    def _write(self, file: Path, both: list[Values]) -> None:
        """Keep the values that nodes read which are not evaluated yet."""

        def is_read(node: fx.Node) -> bool:
            unread = any(self._index[user] >= self._evaluated for user in node.users)
            return unread and node not in self._constant

        torch.save([{self._index[n]: v for n, v in vs.items() if is_read(n)} for vs in both], file)

    def _read(self, file: Path) -> list[Values]:
        both = torch.load(file, weights_only=True)
        return [{self._nodes[i]: value for i, value in values.items()} for values in both]


class _Interpreter(fx.Interpreter):
    """Evaluates nodes: fake-quantized, or where weights are given with these, in float."""

    def __init__(
        self,
        prepared: fx.GraphModule,
        constant: set[fx.Node],
        float_weights: dict[Any, torch.Tensor] | None,
    ) -> None:
        super().__init__(prepared)
        self._constant, self._float_weights = constant, float_weights
        self.constants: Values = {}
        """Values of constant nodes, as long as no weight is replaced."""

    def evaluate(self, node: fx.Node, values: Values) -> Any:
        """Compute a node from the values that it reads."""
        self.env = {read: self.value(read, values) for read in node.all_input_nodes}
        return self.run_node(node)

    def value(self, node: fx.Node, values: Values) -> Any:
        """Return the value of a node that is evaluated or constant."""
        if node not in self._constant:
            return values[node]
        if node not in self._constant:
            return values[node]
        if node not in self.constants:
            self.constants[node] = self.evaluate(node, values)
        return self.constants[node]

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr" and self._float_weights is not None:
            return self._float_weights[n.target]
        if n.op != "call_module":
            return super().run_node(n)
        (value,), _ = self.fetch_args_kwargs_from_env(n)
        if self._float_weights is not None:
            return value
        return fake_quantize(self.module.get_submodule(str(n.target)), value)


def fake_quantize(observer: Any, value: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize a tensor with an observer's scale and zero point."""
    low, high = observer.quant_min, observer.quant_max
    scale, zero = observer.calculate_qparams()
    if scale.numel() == 1 and value.dtype == torch.float32:
        # One pass over memory in place of six: activations at 224² are larger than any cache.
        return torch.fake_quantize_per_tensor_affine(value, float(scale), int(zero), low, high)
    shape = (-1, *[1] * (value.dim() - 1))
    scale, zero = scale.view(shape), zero.view(shape)
    rounded: torch.Tensor = ((value / scale + zero).round().clamp(low, high) - zero) * scale
    return rounded
