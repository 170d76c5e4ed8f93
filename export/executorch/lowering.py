"""Lower programs for ExecuTorch's XNNPACK backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.graph_model import reshape_views_
from compress.common.errors import StageFailed, first_line
from compress.graph.axis_bounds import trace
from export.common.recurrent import refuse_unrolled_rnn
from export.common.targets import SIGNED_8_BITS
from export.executorch.delegation import describe_delegation
from export.executorch.library import quiet_library
from export.executorch.replacements import replacements

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from compress.common.signature import Signature

aten = torch.ops.aten
UNSIGNED = (torch.uint8, torch.uint16)


def lower(program: ExportedProgram, bounded: Signature) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a `.pte` file, and facts of what XNNPACK computes of it.

    What XNNPACK has kernels for is delegated, and memory is planned for the largest sizes.
    `bounded` is the signature with a largest size of every named axis.

    Raises:
        StageFailed: ExecuTorch has no kernel for an operator, or cannot bound a size.
    """
    rounding = [n for n in program.graph.nodes if str(n.target).startswith("quantized_decomposed.")]
    if any(dtype in node.args for node in rounding for dtype in UNSIGNED):
        raise StageFailed(SIGNED_8_BITS)
    refuse_unrolled_rnn(program, "ExecuTorch")
    try:
        with quiet_library(), torch.no_grad():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import (
                EdgeCompileConfig,
                ExecutorchBackendConfig,
                to_edge_transform_and_lower,
            )

            program = trace(program.module(check_guards=False), bounded.example(), bounded)
            reshape_views_(program.graph_module)  # `attention` has other strides than torch's
            program = program.run_decompositions(replacements())
            merge_copies_(program)
            write_clamps_(program)
            # The check of the graph (executorch 1.5.1) takes the length of a tensor where an
            # operator gives several, which fixes the batch to the traced size.
            unchecked = EdgeCompileConfig(_check_ir_validity=False)
            edge = to_edge_transform_and_lower(
                program, partitioner=[XnnpackPartitioner()], compile_config=unchecked
            )
            lowered = edge.exported_program()
            restore_bounds_(lowered)
            delegation = describe_delegation(lowered)
            # The fusion gives quantized tables a kernel, which reads the rows that are looked up.
            config = ExecutorchBackendConfig(do_quant_fusion_and_const_prop=True)
            content = bytes(edge.to_executorch(config).buffer)
    except StageFailed:
        raise
    except Exception as error:
        raise StageFailed(
            f"ExecuTorch cannot lower the model: {type(error).__name__}: {first_line(error)}"
        ) from error
    return content, delegation


def merge_copies_(program: ExportedProgram) -> None:
    """Keep one of several copies of a tensor."""
    # XNNPACK's preprocessing (executorch 1.5.1) drops copies, and fails where two of one tensor
    # leave a part.
    graph, copies = program.graph, dict[Any, Any]()
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        kept = copies.setdefault((node.args, str(node.kwargs)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
    program.graph_module.recompile()


def write_clamps_(program: ExportedProgram) -> None:
    """Write clamps to constant limits as hardtanh, which XNNPACK fuses into the layer before."""
    # XNNPACK's partitioner (executorch 1.5.1) leaves an integer layer with a clamp to portable
    # kernels.
    for node in program.graph.find_nodes(op="call_function", target=aten.clamp.default):
        source: Any = node.args[0]
        limits = (*node.args[1:], None, None)[:2]
        if source.meta["val"].is_floating_point() and not node.kwargs:
            least, most = (
                end if limit is None else limit
                for limit, end in zip(limits, (-math.inf, math.inf), strict=True)
            )
            node.target, node.args = aten.hardtanh.default, (source, least, most)
    program.graph_module.recompile()


def restore_bounds_(program: ExportedProgram) -> None:
    """Give the sizes of a program their ranges back, for which memory is planned."""
    # torch's fake convolution (2.13) compares the batch with 16 to guess a memory format. From then
    # on the batch would be at most 15.
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes: list[Any] = [*value.shape] if isinstance(value, torch.Tensor) else []
        for size in sizes:
            if isinstance(size, torch.SymInt):
                ranges = size.node.shape_env.var_to_range
                ranges |= {k: v for k, v in program.range_constraints.items() if k in ranges}
