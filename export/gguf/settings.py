"""The sizes of a decoder as a GGUF file states them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.export.gguf.tensors import FAMILIES

if TYPE_CHECKING:
    from gguf import GGUFWriter


def check_family(config: Any, title: str) -> None:
    """Raise StageFailed for models that llama.cpp would compute otherwise than transformers."""
    if config.model_type not in FAMILIES:
        raise StageFailed(
            f"{title}: takes decoders of the families {', '.join(FAMILIES)}, found "
            f"{config.model_type}; export_genai and export_compressed_tensors take others"
        )
    rotary = config.rope_parameters["rope_type"]
    if rotary != "default":
        raise StageFailed(
            f"{title}: takes rotary embeddings of type default, found {rotary} (rope_parameters)"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise StageFailed(
            f"{title}: takes attention to the whole text, found sliding_window {window} in a "
            f"context of {config.max_position_embeddings} tokens"
        )
    if config.hidden_act != "silu":
        raise StageFailed(f"{title}: takes hidden_act silu, found {config.hidden_act}")
    heads, size = config.num_attention_heads, _head_size(config)
    if config.model_type == "qwen2" and heads * size != config.hidden_size:
        raise StageFailed(
            f"{title}: llama.cpp takes a Qwen2 whose heads have hidden_size ({config.hidden_size}) "
            f"numbers together, found {heads} heads of {size}; exclude its heads in "
            "prune_channels, or use export_genai or export_compressed_tensors"
        )


def _head_size(config: Any) -> int:
    stated: int | None = getattr(config, "head_dim", None)
    return stated or int(config.hidden_size // config.num_attention_heads)


def add_settings(writer: GGUFWriter, config: Any, name: str) -> None:
    """Write a config's sizes."""
    writer.add_name(name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head = _head_size(config)
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
