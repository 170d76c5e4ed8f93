"""Look up rows of integer embeddings before dequantizing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.quantization.pt2e.quantizer import EMBEDDING

if TYPE_CHECKING:
    from torch.fx import GraphModule

aten = torch.ops.aten
DEQUANTIZE_ROWS = torch.ops.quantized_decomposed.dequantize_per_channel.default


def quantize_lookups_(graph: GraphModule) -> None:
    """Move the dequantization of embedding tables behind the lookup.

    PT2E's conversion puts it before, so that each call would dequantize the whole table to read
    some of its rows.
    """
    for node in list(graph.graph.nodes):
        table = node.args[0] if node.target is EMBEDDING else None
        if table is None or table.target is not DEQUANTIZE_ROWS:
            continue
        integers, scale_V, *_ = table.args
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            rows = call(EMBEDDING, (integers, *node.args[1:]))
            column_V1 = call(aten.unsqueeze.default, (scale_V, 1))
            scales = call(EMBEDDING, (column_V1, node.args[1]))
            floats = call(aten.to.dtype, (rows, torch.float32))
            product = call(aten.mul.Tensor, (floats, scales))
            node.replace_all_uses_with(product, propagate_meta=True)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
