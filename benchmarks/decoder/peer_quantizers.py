"""Quantizes a decoder with one peer, in its environment: `PEER FOLDER TOKENS OUTPUT`.

FOLDER is a Hugging Face folder, TOKENS a safetensors file with `tokens`, calibration texts of one
length. OUTPUT gets the weights as the floats that their integers stand for, by the names in FOLDER.
Linear layers but the head get 4 bits in groups of 32, tables none.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def llm_compressor(model: torch.nn.Module, tokens: torch.Tensor, *, symmetric: bool) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    texts = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens.tolist()]
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group"}
    scheme = {"targets": ["Linear"], "weights": weights | {"group_size": 32}}
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    oneshot(
        model=model,
        dataset=Dataset.from_list(texts),
        recipe=recipe,
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
    )


def main() -> None:
    peer, folder, tokens, output = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = set(model.state_dict())
    texts = load_file(tokens)["tokens"]
    llm_compressor(model, texts, symmetric=peer == "llm_compressor_symmetric")
    state = model.state_dict()
    save_file({name: state[name].contiguous() for name in names}, Path(output))


if __name__ == "__main__":
    main()
