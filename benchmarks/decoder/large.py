"""Speed of a decoder of 124 million random weights, in float32 and in 4 bits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from compress import Context, EagerModel, QuantizeWeights
from compress.artifacts.hf_folder import read_folder, transformers_silenced
from compress.artifacts.importing import import_module
from compress.common.signature import AxisBounds, OutputSpec, Signature, TensorSpec
from decoder.compression import made_once, speed
from export import ExportGenai

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 1024,
}
TOKENS = Signature(
    inputs=(TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="logits"),),
    axes={"length": AxisBounds(max=SIZES["max_position_embeddings"])},
)


def imported(folder: Path) -> EagerModel:
    """Return a Llama with random weights, by way of a Hugging Face folder."""
    import transformers

    torch.manual_seed(0)
    with transformers_silenced():
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        module.save_pretrained(folder / "hf")
    recipe, module = read_folder(folder / "hf", None, untrained_head=False)
    return import_module(folder / "source", recipe, module, TOKENS)


def main(folder: Path) -> None:
    """Print sizes, what was proven, and a table of the speed."""
    source = made_once(folder / "source", partial(imported, folder))
    context = Context(root=folder / "int4", artifacts={"source": source})
    stage = QuantizeWeights(method="rtn", symmetric=True)
    models = {
        "float32": source,
        "int4": made_once(context.root, partial(stage, source, context)),
    }
    for name, model in models.items():
        root = folder / f"genai-{name}"
        made = made_once(root, partial(ExportGenai(), model, context.with_root(root)))
        facts = made.manifest.facts
        equal = f"{facts['equal_tokens']} of {facts['greedy_tokens']} greedy tokens equal"
        print(f"{name}: {made.payload_bytes / 1e6:.1f} MB, {equal}", flush=True)
    print(f"\n{source.parameters():,} weights")
    speed(folder)
