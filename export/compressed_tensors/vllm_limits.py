"""Folders that transformers opens and vLLM does not, by vLLM 0.29's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from export.compressed_tensors.tensors import head_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from export.common.packed_weights import DecoderWeights

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM joins to one, which is wholly packed or wholly float."""


def vllm_limits(weights: DecoderWeights, scheme: Mapping[str, Any]) -> Iterator[str]:
    """Yield why vLLM will not open a folder, with what to change.

    Args:
        weights: what the folder has.
        scheme: the entry `weights` of its `quantization_config`.
    """
    module, bits = weights.module, scheme["num_bits"]
    if bits == 8 and not scheme["symmetric"]:
        yield (
            "vLLM has no kernel for 8 bits with zero points, but for groups of 64 and 128 on a "
            "Hopper GPU; for vLLM write symmetric: true in quantize_weights"
        )
    for name, parent in module.named_modules():
        for layers in JOINED:
            parts = [f"{name}.{layer}" for layer in layers if hasattr(parent, layer)]
            packed = [part for part in parts if (f"{part}.weight", False) in weights.packed]
            if packed and packed != parts:
                yield (
                    f"vLLM joins {', '.join(parts)} to one layer, and does not open a folder in "
                    f"which only {', '.join(packed)} is packed; exclude all of them or none"
                )
                return  # other blocks alike
    head = head_name(module)
    layer = module.get_submodule(head) if head else None
    if (f"{head}.weight", False) in weights.packed and isinstance(layer, nn.Linear):
        per_word = 32 // bits
        if layer.out_features % per_word and not scheme["symmetric"]:
            yield (
                f"vLLM does not open zero points of {head} for {layer.out_features} tokens, which "
                f"{per_word} does not divide; for vLLM exclude {head}, or write symmetric: true"
            )
