"""What reaches an operator of a prepared graph: in floats, and with all before it rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compress.quantization.pt2e.graph_constants import value_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from compress.data.batch import Batch


class Reaching:
    """What reaches operators of a prepared graph whose weights are being replaced."""

    def __init__(self, prepared: fx.GraphModule, batches: Iterable[Batch]) -> None:
        """Remember the weights as they are: those of the float model.

        Args:
            prepared: a graph whose observers have seen their ranges; they see nothing of what runs.
            batches: inputs of the graph, read anew for each operator.
        """
        constants = [node for node in prepared.graph.nodes if node.op == "get_attr"]
        self._originals = {str(node.target): value_of(prepared, node) for node in constants}
        self._prepared = prepared
        self._batches = batches

    @torch.no_grad()
    def pairs(self, node: fx.Node) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield an operator's first input, batch by batch: as floats, and with all before rounded.

        Args:
            node: an operator of the graph.
        """
        floats = _Prefix(self._prepared, node, self._originals)
        rounded = _Prefix(self._prepared, node, None)
        for batch in self._batches:
            yield floats.reached(*batch.inputs), rounded.reached(*batch.inputs)


class _Prefix(fx.Interpreter):
    """Runs what an operator's first input needs: with other weights, or with observers rounding."""

    def __init__(
        self, prepared: fx.GraphModule, node: fx.Node, floats: dict[str, torch.Tensor] | None
    ) -> None:
        super().__init__(prepared)
        self._floats = floats
        self._last: Any = node.args[0]
        self._needed = _ancestors([self._last])
        self._weights: dict[fx.Node, torch.Tensor] = {}
        self._reached: Any = None

    def reached(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.run(*inputs, enable_io_processing=False)
        found: torch.Tensor = self._reached
        return found

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._needed and n.op != "placeholder":
            return None
        if n.op == "get_attr" and self._floats is not None:
            found = self._floats[str(n.target)]
        else:
            found = self._observed(n) if n.op == "call_module" else super().run_node(n)
        if n is self._last:
            self._reached = found
        return found

    def _observed(self, n: fx.Node) -> torch.Tensor:
        (value,), _ = self.fetch_args_kwargs_from_env(n)
        return self._through(n, value) if self._floats is None else value

    def _through(self, n: fx.Node, value: torch.Tensor) -> torch.Tensor:
        of_weight = n.args[0].op == "get_attr"  # type: ignore[union-attr]
        if n in self._weights:
            return self._weights[n]
        rounded = fake_rounded(self.module.get_submodule(str(n.target)), value)
        if of_weight:
            self._weights[n] = rounded
        return rounded


def fake_rounded(observer: Any, value: torch.Tensor) -> torch.Tensor:
    """Return the floats that the integers of an observer's format stand for."""
    shape = (-1, *[1] * (value.dim() - 1))
    scale, zero = (part.view(shape) for part in observer.calculate_qparams())
    low, high = observer.quant_min, observer.quant_max
    rounded: torch.Tensor = ((value / scale + zero).round().clamp(low, high) - zero) * scale
    return rounded


def _ancestors(waiting: list[Any]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found
