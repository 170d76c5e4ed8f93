"""Python's own manual and sources as tokens, and an untrained Llama as a Hugging Face folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

sys.path.append(str(Path(__file__).parents[2] / "examples" / "language_model"))
from llama import VOCABULARY as VOCABULARY
from llama import pages, tokenizer, write_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

TRAINED, MEASURED = 128, 512
"""Tokens of a sample of `train` and of `val`."""
SAMPLES = {"train": 2240, "val": 8, "calibration": 24}


class Tokens(Dataset):
    """Parts of a text, of one length; the labels are the same tokens."""

    def __init__(self, tokens: torch.Tensor, length: int, most: int) -> None:
        parts = tokens[: len(tokens) // length * length].view(-1, length)
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
        self.samples = parts[order[:most]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def splits() -> dict[str, Dataset]:
    """Return other pages for `val` than for `train` and `calibration`."""
    made = tokenizer()

    def joined(texts: Iterator[str]) -> torch.Tensor:
        return torch.tensor([i for text in texts for i in [*made.encode(text).ids, 0]])

    texts = pages()
    seen = joined(text for i, text in enumerate(texts) if i % 10)
    unseen = joined(text for i, text in enumerate(texts) if not i % 10)
    return {
        "train": Tokens(seen, TRAINED, SAMPLES["train"]),
        "calibration": Tokens(seen, MEASURED, SAMPLES["calibration"]),
        "val": Tokens(unseen, MEASURED, SAMPLES["val"]),
    }


def write_untrained(folder: Path) -> None:
    """Write a Llama of 24 million random weights, and the tokenizer, as `save_pretrained` does."""
    from compress.artifacts.hf_folder import transformers_silenced

    with transformers_silenced():
        write_folder(folder, width=512, layers=8)
