"""Your own data: any callable that returns datasets by split name."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, Subset


class Digits(Dataset):
    """One sample is (x, y): 64 pixels and a label."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.x = torch.tensor(images, dtype=torch.float32) / 16
        self.y = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def splits() -> dict[str, Dataset]:
    everything = Digits()
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0)).tolist()
    return {
        "train": Subset(everything, order[:1200]),
        "val": Subset(everything, order[1200:1500]),
        "test": Subset(everything, order[1500:]),
    }
