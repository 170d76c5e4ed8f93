"""Observe some operators of a graph while it runs: what they read first, and what they write."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from compress.data.batch import Batch

    ActivationCallback = Callable[[fx.Node, torch.Tensor, torch.Tensor], None]


class NodeTap(fx.Interpreter):
    """Runs a graph, and observes some of its nodes."""

    def __init__(self, graph: fx.GraphModule, nodes: Collection[fx.Node]) -> None:
        """Prepare a run."""
        super().__init__(graph)
        self.nodes = frozenset(nodes)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and let it be observed."""
        output = super().run_node(n)
        if n not in self.nodes:
            return output
        # The interpreter drops values after their last reader, and after this method at that.
        args, _ = self.fetch_args_kwargs_from_env(n)
        return self.observe(n, args[0] if args else None, output)

    @abstractmethod
    def observe(self, node: fx.Node, source: Any, output: Any) -> Any:
        """Return the output that the run goes on with, given a node's first input and output."""


class _CallbackTap(NodeTap):
    callback: ActivationCallback

    def observe(self, node: fx.Node, source: Any, output: Any) -> Any:
        self.callback(node, source, output)
        return output


@torch.inference_mode()
def tap_activations(
    graph: fx.GraphModule,
    batches: Iterable[Batch],
    nodes: Collection[fx.Node],
    callback: ActivationCallback,
    keep_outputs: Callable[[Any], None] | None = None,
) -> None:
    """Run batches through a graph, one at a time, and pass some of its operators to a callback.

    The callback is called with the operator, its first input and its output; `keep_outputs` with
    the graph's outputs for each batch.
    """
    tap = _CallbackTap(graph, nodes)
    tap.callback = callback
    for batch in batches:
        outputs = tap.run(*batch.inputs)
        if keep_outputs is not None:
            keep_outputs(outputs)


def sample_rows(values: torch.Tensor, count: int, axis: int = 0) -> torch.Tensor:
    """Return a seeded choice along an axis; evenly spaced rows would all be first tokens."""
    length = values.shape[axis]
    if length <= count:
        return values.clone()
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:count]
    return values.index_select(axis, chosen.to(values.device))
