"""Texts that come with Python: what `help("while")` and the like print. Bytes are the tokens."""

from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset

LENGTH = 64


class Pages(Dataset):
    """One sample is 64 bytes; the labels are the same bytes, of which each is to be predicted."""

    def __init__(self, pages: list[str], most: int) -> None:
        text = torch.frombuffer(bytearray("\n".join(pages).encode()), dtype=torch.uint8).long()
        self.samples = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)[:most]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.samples[index], "labels": self.samples[index]}


def splits() -> dict[str, Dataset]:
    pages = [topics[name] for name in sorted(topics)]
    return {
        "train": Pages([page for i, page in enumerate(pages) if i % 5], most=1600),
        "val": Pages(pages[::5], most=64),
    }
