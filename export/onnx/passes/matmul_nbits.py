"""Weights of a few bits in ONNX: products become MatMulNBits, lookups GatherBlockQuantized."""

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
PACKED = "_packed"  # end of the names that `quantize_weights` gives packed integers
ROUNDING_LEVEL = 4
"""`accuracy_level` at which onnxruntime rounds activations to 8 bits, by the weight's groups.

Where a processor has no kernel for that, it multiplies floats. After onnxruntime's source, sums are
exact without VNNI too: four products of 15 and 127 fit in 16 bits, and of 8-bit weights the kernel
for AVX2 multiplies even and odd bytes apart.
"""
ROUNDING = (
    *(aten.flatten.using_ints, aten.mul.Tensor, aten.round.default),
    *(aten.mul.Tensor, aten.unflatten.int),
)
"""Operators of the rounding that `quantize_weights` inserts, from the result back to its source."""


def use_packed_weights(program: ExportedProgram, signature: Signature) -> ExportedProgram:
    """Return a program whose packed layers, tables and experts onnxruntime's operators read."""
    # Otherwise the exporter folds the dequantization of the weights, and writes them as floats.
    if not any(name.endswith(PACKED) for name in program.state_dict):
        return program
    graph = program.module(check_guards=False)
    layers, lookups = {}, {}
    for weight in graph.graph.find_nodes(op="get_attr"):
        # Layers whose weight is made of this one's packed integers alone.
        values = [weight] if str(weight.target).endswith(PACKED) else []
        for node in values:
            for reader in node.users:
                if reader.target is LINEAR and reader.args[1] is node:
                    layers[reader] = weight
                elif reader.target in (aten.embedding.default, aten.index.Tensor):
                    lookups[reader] = weight
                else:
                    values.append(reader)
    lookups = {node: table for node, table in lookups.items() if _reads_halves(node)}
    if not layers and not lookups:
        return program
    for layer, weight in layers.items():
        _use_matmul_nbits_(graph, layer, weight)
    for lookup, table in lookups.items():
        _use_gather_(graph, lookup, table)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return export_program(graph, signature)


def matmul_nbits(
    features: torch.Tensor,
    bytes_NGS: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bits: int,
    group_size: int,
    accuracy_level: int,
) -> torch.Tensor:
    """Call onnxruntime's product of features with a packed weight, for tracing alone."""
    outputs, groups = bytes_NGS.shape[:2]
    attributes: dict[str, Any] = {
        **{"K": groups * group_size, "N": outputs, "bits": bits, "block_size": group_size},
        # Few other execution providers know the attribute, so it is left out where it says nothing.
        **({"accuracy_level": accuracy_level} if accuracy_level else {}),
    }
    product: torch.Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MatMulNBits",
        (features, bytes_NGS, scale, *(() if zero is None else (zero,))),
        attrs=attributes,
        dtype=features.dtype,
        shape=(*features.shape[:-1], outputs),
        version=1,
    )
    return product


def gather_block_quantized(
    bytes_VD: torch.Tensor,
    ids: torch.Tensor,
    scale_VG: torch.Tensor,
    zero: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    """Call onnxruntime's lookup in a table of 4 bits, or of experts, for tracing alone."""
    *between, groups = scale_VG.shape[1:]
    rows: torch.Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::GatherBlockQuantized",
        (bytes_VD, ids, scale_VG, zero),
        attrs={
            **{"bits": 4, "block_size": group_size},
            **{"gather_axis": 0, "quantize_axis": scale_VG.dim() - 1},
        },
        dtype=scale_VG.dtype,
        shape=(*ids.shape, *between, groups * group_size),
        version=1,
    )
    return rows


def matmul_operands(
    packed_NK: torch.Tensor, scale_NG: torch.Tensor, zero_NG: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return a weight's bytes, scales and zero points as MatMulNBits takes them.

    Without zero points it takes the middle, and is a fifth faster (one row, AVX2).
    """
    # Flat, as the exporter leaves a flatten of many numbers in the graph.
    blocks, scale = packed_NK.view(*zero_NG.shape, -1).clone(), scale_NG.flatten()
    if bool((zero_NG == 2 ** (bits - 1)).all()):
        return blocks, scale, None
    # It takes zero points as floats, or packed like the weight.
    is_packed = bits == 4 and not zero_NG.is_floating_point()
    zeros = pack_pairs(zero_NG) if is_packed else zero_NG
    return blocks, scale, zeros.flatten()


def _use_matmul_nbits_(graph: fx.GraphModule, layer: fx.Node, packed: fx.Node) -> None:
    stem = str(packed.target).removesuffix(PACKED)
    packed_weight, scale_NG, zero_NG = _parts(graph, stem)
    bits = 4 if _reads_halves(packed) else 8
    group_size = packed_weight.shape[1] * 8 // bits // scale_NG.shape[1]
    names = (f"{stem}_blocks", f"{stem}_scales", f"{stem}_zeros")
    tensors = matmul_operands(packed_weight, scale_NG, zero_NG, bits)
    # The activation that is rounded to 8 bits by groups before the layer; None where it is not.
    source: Any = layer.args[0]
    for target in ROUNDING:
        source = source.args[0] if source is not None and source.target is target else None
    with graph.graph.inserting_before(layer):
        operands: list[Any] = []
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None:
                graph.register_buffer(name, tensor)
            operands.append(None if tensor is None else graph.graph.get_attr(name))
        call = graph.graph.call_function
        level = ROUNDING_LEVEL if source is not None else 0
        features = source or layer.args[0]
        result = call(matmul_nbits, (features, *operands, bits, group_size, level))
        if len(layer.args) > 2:
            result = call(aten.add.Tensor, (result, layer.args[2]))
    layer.replace_all_uses_with(result)


def _use_gather_(graph: fx.GraphModule, lookup: fx.Node, packed: fx.Node) -> None:
    stem = str(packed.target).removesuffix(PACKED)
    packed_table, scale_VG, zero_VG = _parts(graph, stem)
    group_size = packed_table.shape[-1] * 2 // scale_VG.shape[-1]
    ids: Any = lookup.args[1]
    graph.register_buffer(f"{stem}_zeros", pack_pairs(zero_VG))
    rows = lookup
    while rows.target is not aten.mul.Tensor:  # what is scaled is flattened from groups into rows
        rows = next(reader for reader in rows.users if reader.users)
    (rows,) = rows.users
    with graph.graph.inserting_before(rows):
        names = (f"{stem}_packed", f"{stem}_scale", f"{stem}_zeros")
        table, scale, zeros = (graph.graph.get_attr(name) for name in names)
        call = (table, ids[0] if isinstance(ids, list) else ids, scale, zeros, group_size)
        result = graph.graph.call_function(gather_block_quantized, call)
    rows.replace_all_uses_with(result)


def _parts(graph: fx.GraphModule, stem: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed, scale, zero = (getattr(graph, f"{stem}_{p}") for p in ("packed", "scale", "zero_point"))
    return packed, scale, zero


def _reads_halves(node: fx.Node) -> bool:
    """Whether bytes are unpacked into two numbers of 4 bits."""
    return any(reader.target is aten.bitwise_and.Scalar for reader in node.users)


def pack_pairs(zero_NG: torch.Tensor) -> torch.Tensor:
    """Return 4-bit zero points in bytes, each row padded to whole bytes."""
    padded = torch.nn.functional.pad(zero_NG, (0, zero_NG.shape[-1] % 2))
    return padded[..., ::2] | (padded[..., 1::2] << 4)
