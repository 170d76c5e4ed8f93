"""Texts as samples, and functions that make batches of them, or fail to."""

import torch
from torch.utils.data import Dataset


class Texts(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[str, int]:
        return "ab" * (index + 1), index % 2


def data() -> dict[str, Dataset]:
    return {"train": Texts()}


def as_bytes(samples: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    longest = max(len(text) for text, _ in samples)
    rows = [list(text.ljust(longest).encode()) for text, _ in samples]
    return {"ids": torch.tensor(rows), "labels": torch.tensor([label for _, label in samples])}


def shouted(samples: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    return as_bytes([(text.upper(), label) for text, label in samples])


def one_row(samples: list[tuple[str, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 3), torch.zeros(len(samples))


def broken(samples: list[tuple[str, int]]) -> None:
    raise KeyError("ids")


def nothing(samples: list[tuple[str, int]]) -> None:
    return None
