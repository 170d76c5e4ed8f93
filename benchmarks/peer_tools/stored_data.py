"""The samples of a contest in one file, as the peers get theirs: made once, read by each run."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from compress.data.splits import Splits


def write(data: Splits, inputs: int, file: Path) -> None:
    """Write all splits, whose samples have so many inputs, and then perhaps a target."""
    tensors = {}
    for split, rows in data.datasets.items():
        for number, tensor in enumerate(rows.tensors):
            kind = "input" if number < inputs else "target"
            tensors[f"{split}.{kind}.{number}"] = tensor.contiguous()
    save_file(tensors, file)


def read(file: str, without: str = "") -> dict[str, TensorDataset]:
    """Return what :func:`write` wrote, by split, without one of them."""
    splits: dict[str, tuple[list, list]] = {}
    for name, tensor in sorted(load_file(file).items()):
        split, kind, _ = name.split(".")
        if split == without:
            continue
        splits.setdefault(split, ([], []))[kind == "target"].append(tensor)
    return {split: Samples(inputs, targets) for split, (inputs, targets) in splits.items()}


class Samples(TensorDataset):
    """Samples of one or several inputs, with a target where there is one."""

    def __init__(self, inputs: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        super().__init__(*inputs, *targets)
        self._inputs = len(inputs)

    def __getitem__(self, index: int):
        row = tuple(tensor[index] for tensor in self.tensors)
        inputs, targets = row[: self._inputs], row[self._inputs :]
        return (inputs if self._inputs > 1 else inputs[0], *targets)
