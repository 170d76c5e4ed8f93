"""What flows through a traced graph while samples run through it, one batch at a time."""

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
    hear: ActivationCallback,
) -> None:
    """Run batches through a graph and hand over what some of its operators read and gave.

    Args:
        graph: a traced module; it is not changed.
        batches: inputs of the graph.
        nodes: the operators listened to.
        hear: called with the operator, its first input and its output.
    """
    listening = _Listening(graph, nodes, hear)
    for batch in batches:
        listening.run(*batch.inputs)


def some_rows(values: torch.Tensor, count: int, axis: int = 0) -> torch.Tensor:
    """Return a seeded choice along an axis; evenly spaced ones would all be first tokens."""
    length = values.shape[axis]
    if length <= count:
        return values.clone()
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:count]
    return values.index_select(axis, chosen.to(values.device))


class _Listening(fx.Interpreter):
    def __init__(
        self, graph: fx.GraphModule, nodes: Collection[fx.Node], hear: ActivationCallback
    ) -> None:
        super().__init__(graph)
        self._heard = set(nodes)
        self._hear = hear

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n in self._heard:
            (first, *_), _ = self.fetch_args_kwargs_from_env(n)
            self._hear(n, first, found)
        return found
