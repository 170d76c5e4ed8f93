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

ROUNDING_LEVEL = 4
"""`accuracy_level` at which onnxruntime rounds activations to 8 bits, by the weight's groups.

Where a processor has no kernel for that, it multiplies floats. Sums are exact without VNNI too
(onnxruntime 1.32): four products of 15 and 127 fit in 16 bits, and of 8-bit weights the kernel for
AVX2 multiplies even and odd bytes apart.
"""
ROUNDING = (
    *(aten.flatten.using_ints, aten.mul.Tensor, aten.round.default),
    *(aten.mul.Tensor, aten.unflatten.int),
)
"""Operators of the rounding that `quantize_weights` inserts, from the result back to its source."""


def use_matmul_nbits(program: ExportedProgram, signature: Signature) -> ExportedProgram:
    """Return a program whose linear layers read packed weights by MatMulNBits."""
    # Otherwise the exporter folds the dequantization of the weights, and writes them as floats.
    if not any(name.endswith(PACKED) for name in program.state_dict):
        return program
    graph = program.module(check_guards=False)
    layers = {}
    for weight in graph.graph.find_nodes(op="get_attr"):
        # Layers whose weight is made of this one's packed integers alone; embeddings stay floats.
        values = [weight] if str(weight.target).endswith(PACKED) else []
        for node in values:
            for reader in node.users:
                if reader.target is LINEAR and reader.args[1] is node:
                    layers[reader] = weight
                elif reader.target is not aten.embedding.default:
                    values.append(reader)
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
    accuracy_level: int,
) -> torch.Tensor:
    """Call onnxruntime's product of features with a packed weight, for tracing alone."""
    outputs, groups = scale_NG.shape
    attributes: dict[str, Any] = {
        **{"K": groups * group_size, "N": outputs, "bits": bits, "block_size": group_size},
        # Few other execution providers know the attribute, so it is left out where it says nothing.
        **({"accuracy_level": accuracy_level} if accuracy_level else {}),
    }
    product: torch.Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulNBits",
        (features, bytes_NGS, scale_NG.flatten(), zero),
        attrs=attributes,
        dtype=features.dtype,
        shape=(*features.shape[:-1], outputs),
        version=1,
    )
    return product


def _use_matmul_nbits_(graph: fx.GraphModule, layer: fx.Node, packed: fx.Node) -> None:
    stem = str(packed.target).removesuffix(PACKED)
    packed_weight, scale_NG, zero_NG = (
        getattr(graph, f"{stem}_{part}") for part in ("packed", "scale", "zero_point")
    )
    bits = 4 if any(r.target is aten.bitwise_and.Scalar for r in packed.users) else 8
    group_size = packed_weight.shape[1] * 8 // bits // scale_NG.shape[1]
    graph.register_buffer(f"{stem}_blocks", packed_weight.view(*scale_NG.shape, -1).clone())
    # MatMulNBits takes zero points as floats, or packed like the weight.
    zeros = zero_NG
    if bits == 4 and not zero_NG.is_floating_point():
        padded = torch.nn.functional.pad(zero_NG, (0, zero_NG.shape[1] % 2))
        zeros = padded[:, ::2] | (padded[:, 1::2] << 4)
    graph.register_buffer(f"{stem}_zeros", zeros.flatten())
    with graph.graph.inserting_before(layer):
        names = (f"{stem}_blocks", f"{stem}_scale", f"{stem}_zeros")
        operands: list[Any] = [graph.graph.get_attr(name) for name in names]
        call = graph.graph.call_function
        features: Any = layer.args[0]
        source = _source_of_rounded(features)
        level = ROUNDING_LEVEL if source is not None else 0
        result = call(matmul_nbits, (source or features, *operands, bits, group_size, level))
        if len(layer.args) > 2:
            result = call(aten.add.Tensor, (result, layer.args[2]))
    layer.replace_all_uses_with(result)


def _source_of_rounded(node: fx.Node) -> fx.Node | None:
    """Return the activation that a node rounds to 8 bits by groups; None for any other node."""
    value: Any = node
    for target in ROUNDING:
        if value.target is not target:
            return None
        value = value.args[0]
    return value  # type: ignore[no-any-return]
