"""Run-time ranges of single rows: every vector that a linear layer reads has a scale of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_token and its kin

from compress.quantization.pt2e.qspec import SMALLEST_SCALE

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed
LARGEST = 127
"""Largest integer; ranges are symmetric, so that no zero point differs from row to row."""
INTEGERS = (-LARGEST, LARGEST, torch.int8)


def scale_rows_(graph: GraphModule) -> None:
    """Take each activation's range from its rows instead of the whole call, in place.

    Rows of a batch then leave each other's answers alone. Each range becomes the largest magnitude
    along the last axis, which is the one that a linear layer sums over.

    Args:
        graph: an integer graph whose ranges are chosen in each call.
    """
    for chosen in graph.graph.find_nodes(
        op="call_function", target=decomposed.choose_qparams.tensor
    ):
        source = chosen.args[0]
        scale, zero = _row_scale(graph, chosen, source)
        for quantized in [n for n in source.users if _reads(n, chosen)]:
            with graph.graph.inserting_before(quantized):
                integers = graph.graph.call_function(
                    decomposed.quantize_per_token.default, (source, scale, zero, *INTEGERS)
                )
            for restored in list(quantized.users):
                with graph.graph.inserting_before(restored):
                    floats = graph.graph.call_function(
                        decomposed.dequantize_per_token.default,
                        (integers, scale, zero, *INTEGERS, torch.float32),
                    )
                floats.meta |= {k: v for k, v in restored.meta.items() if k != "val"}
                restored.replace_all_uses_with(floats)
                graph.graph.erase_node(restored)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _row_scale(graph: GraphModule, chosen: Node, source: Any) -> tuple[Node, Node]:
    """Return nodes of each row's scale, and of its zero point, which is 0."""
    call = graph.graph.call_function
    with graph.graph.inserting_before(chosen):
        largest = call(aten.amax.default, (call(aten.abs.default, (source,)), [-1], True))
        scale = call(aten.mul.Tensor, (largest, 1 / LARGEST))
        scale = call(aten.clamp_min.default, (scale, SMALLEST_SCALE))
        return scale, call(aten.zeros_like.default, (scale,))


def _reads(node: Node, chosen: Node) -> bool:
    """Whether a node rounds with the range that another chose."""
    scale: Any = node.args[1] if node.target is decomposed.quantize_per_tensor.tensor else None
    return scale is not None and scale.args[:1] == (chosen,)
