"""What llama.cpp answers with the files of `export_gguf`: tiny decoders with random weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from llama_cpp import Llama  # pip install llama-cpp-python, which compiles for some minutes

from compress import EagerModel, PruneChannels, QuantizeWeights
from compress.artifacts.hf_folder import offline_transformers
from compress.common.tensor_difference import relative_error
from compress.export import ExportGguf
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


def print_rows(name: str, source: EagerModel, folder: Path) -> None:
    """Print a row for each kind of weights of a model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    for weights, settings in SETTINGS.items():
        model, root = source, folder / name
        if settings is not None:
            stage = QuantizeWeights(activation_bits=32, **settings)
            model = stage(source, context_for(source, root / weights))
        file = ExportGguf()(model, context_for(source, root / f"{weights}-file")).payload_path
        expected = model.open()(torch.tensor([IDS]))[0][0]
        llama = Llama(str(file), n_ctx=LONGEST, n_threads=1, logits_all=True, verbose=False)
        llama.eval(IDS)
        found = torch.tensor(np.array(llama.scores[: len(IDS)]))
        split = llama.tokenize(TEXT.encode(), add_bos=False, special=True)
        equal = int((found.argmax(-1) == expected.argmax(-1)).sum())
        print(
            f"| {name} | {weights} | {relative_error(expected, found):.1e} "
            f"| {equal} of {len(IDS)} | {split == tokenizer(TEXT).input_ids} |",
            flush=True,
        )


def main() -> None:
    """Print a table of all families, and of the same with half the heads and inner width."""
    print("| family | weights | difference of scores | equal next tokens | text split alike |")
    print("|---|---|---|---|---|")
    for kind, sizes in FAMILIES.items():
        with TemporaryDirectory() as name, offline_transformers("the benchmark"):
            folder = Path(name)
            sizes = {"hidden_size": 128, "intermediate_size": 256, **sizes}
            source = decoder(folder, kind, merges=MERGES, **sizes)
            print_rows(kind, source, folder)
            # Heads of a Qwen2 may not be fewer in llama.cpp.
            prune = PruneChannels(
                ratio=0.5,
                calibration_samples=0,
                exclude=("*.self_attn",) if kind == "Qwen2" else (),
            )
            print_rows(f"{kind}, pruned", prune(source, context_for(source, folder / "p")), folder)
