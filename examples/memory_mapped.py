"""A data factory over arrays too large for memory: rows are read from disk as they are asked for.

    data:
      factory: memory_mapped:splits
      arguments: {folder: /data/pixels}
      loader: {workers: 4}

`folder` holds train_x.npy, train_y.npy, val_x.npy and val_y.npy, as numpy.save writes them.
"""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


class MemoryMapped(Dataset):
    """Rows of two .npy files; nothing but the rows asked for is read."""

    def __init__(self, x: Path, y: Path) -> None:
        self.x = np.load(x, mmap_mode="r")
        self.y = np.load(y, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # A copy of the row: a tensor must not point into a file that is mapped read-only.
        return torch.from_numpy(np.array(self.x[index])), torch.as_tensor(int(self.y[index]))


def splits(folder: str) -> dict[str, Dataset]:
    place = Path(folder)
    return {
        name: MemoryMapped(place / f"{name}_x.npy", place / f"{name}_y.npy")
        for name in ("train", "val")
    }
