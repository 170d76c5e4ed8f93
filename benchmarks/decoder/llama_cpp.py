"""What llama.cpp answers with the files of `export_gguf`: tiny decoders with random weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from llama_cpp import Llama  # pip install llama-cpp-python, which compiles for some minutes

from compress import QuantizeWeights
from compress.artifacts.hf_folder import transformers_silenced
from compress.common.tensor_difference import relative_error
from export import ExportGguf
from tests.export.tiny_decoder import LONGEST, context_for, decoder

FAMILIES = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
}
SETTINGS = {
    "float32": None,
    "Q8_0": {"symmetric": True, "bits": 8},
    "Q4_0": {"symmetric": True},
    "Q4_1": {"exclude": ("*.o_proj",)},
}
MERGES = [("h", "e"), ("t", "h"), ("i", "s"), ("Ġ", "w")]
TEXT = "The with statement: it's 123 ways — naïve\n\n  x<|end|>y"
IDS = [256, 51, 71, 68, 220, 86, 72, 83, 71, 220, 82, 83]


def main() -> None:
    print("| family | weights | difference of scores | equal next tokens | text split alike |")
    print("|---|---|---|---|---|")
    for kind, sizes in FAMILIES.items():
        with TemporaryDirectory() as name, transformers_silenced():
            folder = Path(name)
            sizes = {"hidden_size": 128, "intermediate_size": 192, **sizes}
            source = decoder(folder, kind, merges=MERGES, **sizes)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
            for weights, settings in SETTINGS.items():
                model = source
                if settings is not None:
                    stage = QuantizeWeights(activation_bits=32, **settings)
                    model = stage(source, context_for(source, folder / weights))
                root = folder / f"{weights}-file"
                file = ExportGguf()(model, context_for(source, root)).payload_path
                expected = model.open()(torch.tensor([IDS]))[0][0]
                llama = Llama(str(file), n_ctx=LONGEST, n_threads=1, logits_all=True, verbose=False)
                llama.eval(IDS)
                found = torch.tensor(np.array(llama.scores[: len(IDS)]))
                split = llama.tokenize(TEXT.encode(), add_bos=False, special=True)
                equal = int((found.argmax(-1) == expected.argmax(-1)).sum())
                print(
                    f"| {kind} | {weights} | {relative_error(expected, found):.1e} "
                    f"| {equal} of {len(IDS)} | {split == tokenizer(TEXT).input_ids} |"
                )
