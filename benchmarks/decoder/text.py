"""Python's own manual and sources as a decoder's tokens, and the decoder as it begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[2] / "examples" / "language_model"))
from llama import VOCABULARY as VOCABULARY
from llama import Texts, pages, write_folder
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from torch.utils.data import Dataset

TRAINED, MEASURED = 128, 512
"""Tokens of a sample of `train` and of `val`."""
SAMPLES = {"train": 2240, "val": 8, "calibration": 24}
END = 0
"""The token after a text, of both tokenizers."""


def initial_folder(folder: Path) -> Path:
    """Return the Hugging Face folder that all begins with; without one, a Llama's random weights.

    That Llama has 24 million of them.
    """
    initial = folder / "initial"
    if not (initial / "tokenizer.json").exists():
        from compress.artifacts.hf_folder import offline_transformers

        with offline_transformers("the benchmark"):
            write_folder(initial, width=512, layers=8)
    return initial


def splits(folder: Path) -> dict[str, Dataset]:
    """Return other pages for `val` than for `train` and `calibration`."""
    tokenizer = Tokenizer.from_file(str(initial_folder(folder) / "tokenizer.json"))
    tokenizer.no_truncation()  # to the context, as an artifact of ours has it
    encoded = [[*text.ids, END] for text in tokenizer.encode_batch(pages())]
    seen = [i for number, ids in enumerate(encoded) if number % 10 for i in ids]
    unseen = [i for ids in encoded[::10] for i in ids]
    return {
        "train": Texts(seen, SAMPLES["train"], TRAINED),
        "calibration": Texts(seen, SAMPLES["calibration"], MEASURED),
        "val": Texts(unseen, SAMPLES["val"], MEASURED),
    }
