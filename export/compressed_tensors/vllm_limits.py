"""Folders that transformers opens and vLLM does not, by vLLM 0.29's own code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from compress.export.compressed_tensors.tensors import head_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from compress.export.common.packed_weights import DecoderWeights

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
    joined = next(_partly_packed(weights), None)
    if joined is not None:
        parts, packed = joined
        yield (
            f"vLLM joins {', '.join(parts)} to one layer, and does not open a folder in which only "
            f"{', '.join(packed)} is packed; exclude all of them or none"
        )
    config: Any = module.config
    if type(module).__name__ == "Qwen2ForCausalLM" and (
        (getattr(config, "head_dim", None) or config.hidden_size) * config.num_attention_heads
        < config.hidden_size
    ):
        yield (
            "vLLM's Qwen2 takes the width by the number of heads as their size, and does not open "
            'one with fewer heads; do not prune them (exclude: ["*.self_attn"])'
        )
    head = head_name(module)
    layer = module.get_submodule(head) if head else None
    if (f"{head}.weight", False) in weights.packed and isinstance(layer, nn.Linear):
        per_word = 32 // bits
        if layer.out_features % per_word and not scheme["symmetric"]:
            yield (
                f"vLLM does not open zero points of {head} for {layer.out_features} tokens, which "
                f"{per_word} does not divide; for vLLM exclude {head}, or write symmetric: true"
            )


def _partly_packed(weights: DecoderWeights) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the layers that vLLM joins, and those of them that are packed, where some are not."""
    for name, parent in weights.module.named_modules():
        for layers in JOINED:
            parts = [f"{name}.{layer}" for layer in layers if hasattr(parent, layer)]
            packed = [part for part in parts if (f"{part}.weight", False) in weights.packed]
            if packed and packed != parts:
                yield parts, packed
