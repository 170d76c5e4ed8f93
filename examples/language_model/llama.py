"""A small Llama as a Hugging Face folder, and texts for it: `python llama.py my-llama`.

The weights are random; `generate.yaml` trains them. `--width 512 --layers 8` makes 24 million of
them instead of 3.4 million.
"""

import argparse
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LENGTH = 1024, 128
END = "<|end|>"


def pages() -> list[str]:
    """Return what `help("while")` and the like print, and the sources of the standard library."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text("utf-8", errors="replace") for file in sources]
    return [topics[name] for name in sorted(topics)] + texts


def tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer that is learned from these texts, the same each time."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(pages()[::4], trainer)
    return made


class Texts(Dataset):
    """Parts of a text, of one length; the labels are the same tokens."""

    def __init__(self, ids: list[int], most: int, length: int = LENGTH) -> None:
        parts = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(0))
        self.samples = parts[order[:most]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def splits(train: int = 4000, val: int = 48) -> dict[str, Dataset]:
    """Return so many samples to train with, and others, from other pages, to measure with."""
    encoded = [[*text.ids, 0] for text in tokenizer().encode_batch(pages())]
    seen = [i for number, ids in enumerate(encoded) if number % 10 for i in ids]
    unseen = [i for ids in encoded[::10] for i in ids]
    return {"train": Texts(seen, train), "val": Texts(unseen, val)}


def write_folder(folder: Path, width: int = 256, layers: int = 4) -> None:
    """Write config, random weights and tokenizer, as `save_pretrained` does."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 21 // 8,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    write_folder(given.folder, given.width, given.layers)
