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


def with_packed_products(program: ExportedProgram, signature: Signature) -> ExportedProgram:
    """Return a program whose products read packed weights as they are.

    Left alone, an exporter folds what turns them back into floats, and writes these.

    Args:
        program: what :class:`~compress.artifacts.graph_model.GraphModel` holds.
        signature: its interface.
    """
    if not any(name.endswith(PACKED) for name in program.state_dict):
        return program
    graph = program.module(check_guards=False)
    found = [node for node in graph.graph.nodes if _is_packed(node)]
    products = {product: node for node in found for product in _products(node)}
    if not products:
        return program
    for product, packed in products.items():
        _multiply_packed_(graph, product, packed)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return export_program(graph, signature)


def multiply(
    features: torch.Tensor,
    bytes_NGS: torch.Tensor,
    scale_NG: torch.Tensor,
    zero: torch.Tensor,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """Stand for onnxruntime's product of features with a packed weight."""
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


def _is_packed(node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target).endswith(PACKED)


def _products(packed: fx.Node) -> list[fx.Node]:
    """Return the linear layers whose weight is made of packed integers alone."""
    found, seen = [], [packed]
    for node in seen:
        for reader in node.users:
            if reader.target is LINEAR and reader.args[1] is node:
                found.append(reader)
            elif reader.target is not aten.embedding.default:
                seen.append(reader)
    return found


def _multiply_packed_(graph: fx.GraphModule, product: fx.Node, packed: fx.Node) -> None:
    stem = str(packed.target).removesuffix(PACKED)
    held, scale_NG, zero_NG = (
        getattr(graph, f"{stem}_{part}") for part in ("packed", "scale", "zero_point")
    )
    bits = 4 if any(r.target is aten.bitwise_and.Scalar for r in packed.users) else 8
    group_size = held.shape[1] * 8 // bits // scale_NG.shape[1]
    graph.register_buffer(f"{stem}_blocks", held.view(*scale_NG.shape, -1).clone())
    graph.register_buffer(f"{stem}_zeros", _packed_zeros(zero_NG, bits))
    with graph.graph.inserting_before(product):
        names = (f"{stem}_blocks", f"{stem}_scale", f"{stem}_zeros")
        operands: list[Any] = [graph.graph.get_attr(name) for name in names]
        call = graph.graph.call_function
        result = call(multiply, (product.args[0], *operands, bits, group_size))
        if len(product.args) > 2:
            result = call(aten.add.Tensor, (result, product.args[2]))
    product.replace_all_uses_with(result)


def _packed_zeros(zero_NG: torch.Tensor, bits: int) -> torch.Tensor:
    """Return zero points as MatMulNBits takes them: a float each, or packed like the weight."""
    if zero_NG.is_floating_point() or bits == 8:
        return zero_NG.flatten()
    padded = torch.nn.functional.pad(zero_NG, (0, zero_NG.shape[1] % 2))
    return (padded[:, ::2] | (padded[:, 1::2] << 4)).flatten()
