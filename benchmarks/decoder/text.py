"""Python's own manual and sources as tokens, and an untrained Llama as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[2] / "examples" / "language_model"))
from llama import VOCABULARY as VOCABULARY
from llama import Texts, pages, tokenizer, write_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import Dataset

TRAINED, MEASURED = 128, 512
"""Tokens of a sample of `train` and of `val`."""
SAMPLES = {"train": 2240, "val": 8, "calibration": 24}


def splits() -> dict[str, Dataset]:
    """Return other pages for `val` than for `train` and `calibration`."""
    made = tokenizer()

    def joined(texts: Iterator[str]) -> list[int]:
        return [i for text in texts for i in [*made.encode(text).ids, 0]]

    texts = pages()
    seen = joined(text for i, text in enumerate(texts) if i % 10)
    unseen = joined(text for i, text in enumerate(texts) if not i % 10)
    return {
        "train": Texts(seen, SAMPLES["train"], TRAINED),
        "calibration": Texts(seen, SAMPLES["calibration"], MEASURED),
        "val": Texts(unseen, SAMPLES["val"], MEASURED),
    }


def write_untrained(folder: Path) -> None:
    """Write a Llama of 24 million random weights, and the tokenizer, as `save_pretrained` does."""
    from compress.artifacts.hf_folder import transformers_silenced

    with transformers_silenced():
        write_folder(folder, width=512, layers=8)
