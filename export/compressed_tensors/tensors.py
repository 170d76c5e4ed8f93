"""Integers of a few bits in the layout `pack-quantized` of compressed-tensors, and back.

A row's integers follow each other in 32-bit words, the earlier ones in the lower bits, as the bytes
of `quantize_weights` do. Both store an integer plus half its range, so that only the type differs.
Zero points are packed along the outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from export.common.packed_weights import DecoderWeights, PackedWeight

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def state_of(weights: DecoderWeights) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder: packed linear layers, and all others as floats."""
    from torch import nn

    state = {name: x.detach() for name, x in weights.module.state_dict().items()}
    for (name, is_table), weight in weights.packed.items():
        stem = name.removesuffix(".weight")
        layer = weights.module.get_submodule(stem)
        if is_table and isinstance(layer, nn.Embedding):
            state[name] = weight.dequantized()
        elif not is_table and isinstance(layer, nn.Linear):
            state.pop(name)
            state |= {f"{stem}.{part}": x for part, x in packed_state(name, weight).items()}
    # Tied weights of the module share memory, which safetensors does not store.
    return {name: x.clone().contiguous() for name, x in sorted(state.items())}


def packed_state(name: str, weight: PackedWeight) -> dict[str, torch.Tensor]:
    """Return a layer's tensors by their names in the format; StageFailed for float zero points."""
    if weight.zero_point.is_floating_point():
        raise StageFailed(
            f"{name} has zero points between two integers, as method hqq fits them, which "
            "compressed-tensors has not; use gptq, awq or rtn"
        )
    outputs, groups = weight.zero_point.shape
    integers_in_word = 32 // weight.bits
    padded = torch.zeros(groups, -(-outputs // integers_in_word) * integers_in_word)
    padded = padded.to(torch.uint8)
    padded[:, :outputs] = weight.zero_point.T
    if weight.bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << 4)
    inputs = weight.packed.shape[1] * 8 // weight.bits
    values = (
        weight.packed.contiguous().view(torch.int32),
        weight.scale,
        padded.contiguous().view(torch.int32).T,
        torch.tensor([outputs, inputs]),
    )
    return dict(zip(PARTS, values, strict=True))


def unpacked(state: Mapping[str, torch.Tensor], stem: str, bits: int) -> PackedWeight:
    """Return a layer's integers, read from the tensors of a folder."""
    from export.common.packed_weights import PackedWeight

    packed, scale, zeros, shape = (state[f"{stem}.{part}"] for part in PARTS)
    outputs = int(shape[0])
    zeros = zeros.T.contiguous().view(torch.uint8)
    if bits == 4:
        zeros = torch.stack((zeros & 15, zeros >> 4), -1).flatten(1)
    return PackedWeight(
        packed.view(torch.uint8), scale, zeros[:, :outputs].T.contiguous(), bits, is_table=False
    )


def quantization_config(weights: DecoderWeights) -> dict[str, Any]:
    """Return the entry of `config.json` that says how weights are packed.

    Raises:
        StageFailed: no linear layer is packed, or layers differ in bits or groups.
    """
    from torch import nn

    linears = [n for n, m in weights.module.named_modules() if isinstance(m, nn.Linear)]
    packed = {n: weights.packed[f"{n}.weight", False] for n in linears if _has(weights, n)}
    formats = {(weight.bits, weight.group_size) for weight in packed.values()}
    if len(formats) != 1:
        found = ", ".join(f"{bits} bits in groups of {size}" for bits, size in sorted(formats))
        raise StageFailed(
            "writes linear layers of one format, as quantize_weights makes them, found "
            f"{found or 'none in few bits'}"
        )
    ((bits, group_size),) = formats
    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": [name for name in linears if name not in packed],
        "kv_cache_scheme": None,
    }


def _has(weights: DecoderWeights, name: str) -> bool:
    return (f"{name}.weight", False) in weights.packed
