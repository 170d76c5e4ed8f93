"""Observe some operators of a graph while it runs: what they read first, and what they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from compress.data.batch import Batch


class NodeTap(fx.Interpreter):
    """Runs a graph, and lets a function observe some of its nodes.

    `observe` is called with a node, its first input and its output, and returns the output that the
    run goes on with.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        nodes: Iterable[fx.Node],
        observe: Callable[[fx.Node, Any, Any], Any],
    ) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # fx would append its node to the message of StageFailed
        self._nodes, self._observe = frozenset(nodes), observe

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and let it be observed."""
        output = super().run_node(n)
        if n not in self._nodes:
            return output
        # The interpreter drops values after their last reader, and after this method at that.
        args, _ = self.fetch_args_kwargs_from_env(n)
        return self._observe(n, args[0] if args else None, output)


@torch.inference_mode()
def tap_activations(
    graph: fx.GraphModule,
    batches: Iterable[Batch],
    nodes: Collection[fx.Node],
    callback: Callable[[fx.Node, torch.Tensor, torch.Tensor], None],
    keep_outputs: Callable[[Any], None] = lambda outputs: None,
) -> None:
    """Run batches through a graph, one at a time, and pass some of its operators to a callback.

    The callback is called with the operator, its first input and its output; `keep_outputs` with
    the graph's outputs for each batch.
    """

    def observe(node: fx.Node, source: Any, output: Any) -> Any:
        callback(node, source, output)
        return output

    tap = NodeTap(graph, nodes, observe)
    for batch in batches:
        keep_outputs(tap.run(*batch.inputs))


def sample_rows(values: torch.Tensor, count: int, axis: int = 0) -> torch.Tensor:
    """Return a seeded choice along an axis; evenly spaced rows would all be first tokens."""
    length = values.shape[axis]
    if length <= count:
        return values.clone()
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(0))[:count]
    return values.index_select(axis, chosen.to(values.device))
