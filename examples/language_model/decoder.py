"""A small Llama over bytes, with random weights."""

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def decoder(width: int = 64, layers: int = 2) -> nn.Module:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=256,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
