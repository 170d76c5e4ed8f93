"""Which decoders of transformers become proven folders: tiny ones, made from their configs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

from compress import Artifact, Context
from compress.artifacts.hf_folder import offline_transformers, read_folder
from compress.artifacts.importing import import_module
from compress.common.errors import CompressError
from compress.common.signature import AxisBounds, OutputSpec, Signature, TensorSpec
from compress.export import ExportGenai

LONGEST = 96
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
DECODERS = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 8},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Phi3ForCausalLM": {},
    "PhiForCausalLM": {"hidden_size": 128},
    "GemmaForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16, "sliding_window": 8},
    "OlmoForCausalLM": {},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    "GraniteForCausalLM": {},
    "StableLmForCausalLM": {"hidden_size": 128},
    "Starcoder2ForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONGEST},
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
}
TOKENS = Signature(
    inputs=(TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="logits"),),
    axes={"length": AxisBounds(max=LONGEST)},
)


def proven(name: str, sizes: dict[str, object], folder: Path) -> Artifact:
    """Return the folder of a decoder with random weights; CompressError where there is none."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    module = kind(kind.config_class(**{**SIZES, **sizes}))
    with torch.no_grad():  # as small as they are drawn, all scores are near ties
        for parameter in module.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    with offline_transformers("the benchmark"):
        module.save_pretrained(folder / "hf")
    recipe, module = read_folder(folder / "hf", None, untrained_head=False)
    source = import_module(folder / "source", recipe, module, TOKENS)
    return ExportGenai()(source, Context(root=folder / "genai", artifacts={"source": source}))


def main() -> None:
    """Print a row for each decoder."""
    print("| decoder | equal greedy tokens | rotary in attention |\n|---|---|---|")
    count = 0
    for name, sizes in DECODERS.items():
        with TemporaryDirectory() as folder:
            try:
                facts = proven(name, sizes, Path(folder)).manifest.facts
            except CompressError as error:
                print(f"| {name} | refused: {error} | |", flush=True)
                continue
        count += 1
        equal = f"{facts['equal_tokens']} of {facts['greedy_tokens']}"
        print(f"| {name} | {equal} | {facts['rotary_in_attention']} |", flush=True)
    print(f"\n{count} of {len(DECODERS)} decoders became proven folders")
