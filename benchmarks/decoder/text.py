"""Python's own manual and sources as tokens, and an untrained Llama as a Hugging Face folder."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

VOCABULARY = 1024
TRAINED, MEASURED = 128, 512
"""Tokens of a sample of `train` and of `val`."""
SAMPLES = {"train": 2240, "val": 8, "calibration": 24}


def pages() -> list[str]:
    """Return the manual's topics and the sources of the standard library."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text("utf-8", errors="replace") for file in sources]
    return [topics[name] for name in sorted(topics)] + texts


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of these texts, the same each time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    made.train_from_iterator(pages()[::4], trainer)
    return made


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
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from compress.artifacts.hf_folder import transformers_silenced

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1344,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with transformers_silenced():
        LlamaForCausalLM(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token="<|end|>")
    fast.save_pretrained(folder)
