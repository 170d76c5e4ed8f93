"""The tensors of a GGUF file: their names, and the order of rows that llama.cpp expects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from compress.artifacts.streaming.packed_weight import PackedWeight
    from compress.export.common.packed_weights import DecoderWeights


class Family(NamedTuple):
    """How llama.cpp computes the models of a `model_type` of transformers."""

    architecture: str
    """Its name in GGUF."""
    interleaves_rotary: bool
    """Whether pairs of rotated numbers lie beside each other there, and half a head apart here."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", True),
    "mistral": Family("llama", True),
    "qwen2": Family("qwen2", False),
    "qwen3": Family("qwen3", False),
}


class FileTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    """By which llama.cpp finds it."""
    source: str
    """The parameter's name in transformers."""
    values: torch.Tensor | PackedWeight
    row_order: torch.Tensor | None
    """Which of the parameter's rows each of its rows is, where the order is another."""


def file_tensors(weights: DecoderWeights) -> Iterator[FileTensor]:
    """Yield the tensors of a decoder's file, whose names GGUF's own table gives.

    A weight that is tied in the model, but was packed otherwise as a table than as a layer, is
    written twice.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    module: Any = weights.module
    config = module.config
    family = FAMILIES[config.model_type]
    names = get_tensor_name_map(MODEL_ARCH[family.architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings and ("lm_head.weight", False) not in weights.packed
    tables = {n for n, layer in module.named_modules() if isinstance(layer, torch.nn.Embedding)}
    for source, parameter in module.named_parameters(remove_duplicate=False):
        stem, _, kind = source.rpartition(".")
        if tied and stem == "lm_head":
            continue  # llama.cpp reads the table of embeddings instead
        order = None
        layer = stem.rpartition(".")[2]
        if family.interleaves_rotary and layer in heads:
            halves = torch.arange(len(parameter)).view(heads[layer], 2, -1)
            order = halves.transpose(1, 2).flatten()
        values: Any = weights.packed.get((source, stem in tables), parameter.detach())
        yield FileTensor(f"{names.get_name(stem)}.{kind}", source, values, order)
