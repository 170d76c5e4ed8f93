"""Weights of a few bits in ONNX: products with packed integers become MatMulNBits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.graph.torch_export import export_program

if TYPE_CHECKING:
    from torch import fx
    from torch.export import ExportedProgram

    from compress.common.signature import Signature

aten = torch.ops.aten
LINEAR = aten.linear.default
PACKED = "_packed"
"""End of the names that `quantize_weights` gives packed integers."""


def use_matmul_nbits(program: ExportedProgram, signature: Signature) -> ExportedProgram:
    """Return a program whose linear layers read packed weights by MatMulNBits.

    Otherwise the exporter folds the dequantization of the weights, and writes them as floats.

    Args:
        program: what :class:`~compress.artifacts.graph_model.GraphModel` stores.
        signature: its interface.
    """
    if not any(name.endswith(PACKED) for name in program.state_dict):
        return program
    graph = program.module(check_guards=False)
    weights = [
        n for n in graph.graph.nodes if n.op == "get_attr" and str(n.target).endswith(PACKED)
    ]
    layers = {layer: weight for weight in weights for layer in _layers_reading(weight)}
    if not layers:
        return program
    for layer, weight in layers.items():
        _use_matmul_nbits_(graph, layer, weight)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return export_program(graph, signature)


def matmul_nbits(
    features: torch.Tensor,
    bytes_NGS: torch.Tensor,
    scale_NG: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """Call onnxruntime's product of features with a packed weight, for tracing alone."""
    outputs, groups = scale_NG.shape
    product: torch.Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulNBits",
        (features, bytes_NGS, scale_NG.flatten(), zero),
        attrs={"K": groups * group_size, "N": outputs, "bits": bits, "block_size": group_size},
        dtype=features.dtype,
        shape=(*features.shape[:-1], outputs),
        version=1,
    )
    return product


def _layers_reading(packed: fx.Node) -> list[fx.Node]:
    """Return the linear layers whose weight is made of packed integers alone."""
    layers, values = [], [packed]
    for node in values:
        for reader in node.users:
            if reader.target is LINEAR and reader.args[1] is node:
                layers.append(reader)
            elif reader.target is not aten.embedding.default:
                values.append(reader)
    return layers


def _use_matmul_nbits_(graph: fx.GraphModule, layer: fx.Node, packed: fx.Node) -> None:
    stem = str(packed.target).removesuffix(PACKED)
    packed_weight, scale_NG, zero_NG = (
        getattr(graph, f"{stem}_{part}") for part in ("packed", "scale", "zero_point")
    )
    bits = 4 if any(r.target is aten.bitwise_and.Scalar for r in packed.users) else 8
    group_size = packed_weight.shape[1] * 8 // bits // scale_NG.shape[1]
    graph.register_buffer(f"{stem}_blocks", packed_weight.view(*scale_NG.shape, -1).clone())
    graph.register_buffer(f"{stem}_zeros", _packed_zeros(zero_NG, bits))
    with graph.graph.inserting_before(layer):
        names = (f"{stem}_blocks", f"{stem}_scale", f"{stem}_zeros")
        operands: list[Any] = [graph.graph.get_attr(name) for name in names]
        call = graph.graph.call_function
        result = call(matmul_nbits, (layer.args[0], *operands, bits, group_size))
        if len(layer.args) > 2:
            result = call(aten.add.Tensor, (result, layer.args[2]))
    layer.replace_all_uses_with(result)


def _packed_zeros(zero_NG: torch.Tensor, bits: int) -> torch.Tensor:
    """Return zero points as MatMulNBits takes them: a float each, or packed like the weight."""
    if zero_NG.is_floating_point() or bits == 8:
        return zero_NG.flatten()
    padded = torch.nn.functional.pad(zero_NG, (0, zero_NG.shape[1] % 2))
    return (padded[:, ::2] | (padded[:, 1::2] << 4)).flatten()
