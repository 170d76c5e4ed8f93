"""Pass the inputs and outputs of some operators of a graph to a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from compress.data.batch import Batch

    ActivationCallback = Callable[[fx.Node, torch.Tensor, torch.Tensor], None]


@torch.inference_mode()
def tap_activations(
    graph: fx.GraphModule,
    batches: Iterable[Batch],
    nodes: Collection[fx.Node],
    callback: ActivationCallback,
    keep_outputs: Callable[[Any], None] | None = None,
) -> None:
    """Run batches through a graph, one at a time, and observe some of its operators.

    The callback is called with the operator, its first input and its output; `keep_outputs` with
    the graph's outputs for each batch.
    """
    interpreter = _TapInterpreter(graph, nodes, callback)
    for batch in batches:
        outputs = interpreter.run(*batch.inputs)
        if keep_outputs is not None:
            keep_outputs(outputs)


class _TapInterpreter(fx.Interpreter):
    def __init__(
        self, graph: fx.GraphModule, nodes: Collection[fx.Node], callback: ActivationCallback
    ) -> None:
        super().__init__(graph)
        self._nodes = set(nodes)
        self._callback = callback

    def run_node(self, n: fx.Node) -> Any:
        output = super().run_node(n)
        if n in self._nodes:
            (source, *_), _ = self.fetch_args_kwargs_from_env(n)
            self._callback(n, source, output)
        return output


def sample_rows(values: torch.Tensor, count: int, axis: int = 0) -> torch.Tensor:
    """Return a seeded choice along an axis; evenly spaced rows would all be first tokens."""
    length = values.shape[axis]
    if length <= count:
        return values.clone()
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:count]
    return values.index_select(axis, chosen.to(values.device))
