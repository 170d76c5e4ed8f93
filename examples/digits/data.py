"""scikit-learn's digits: 1797 real 8x8 scans, split by a fixed seed, stratified by class."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset


def digits(seed: int = 0) -> dict[str, TensorDataset]:
    """60 % train, 20 % val, 20 % test; pixels scaled to -1 … 1."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels, dtype=torch.int64)
    rest, test = train_test_split(range(len(y)), test_size=0.2, random_state=seed, stratify=labels)
    train, val = train_test_split(rest, test_size=0.25, random_state=seed, stratify=labels[rest])
    return {
        name: TensorDataset(x[indices], y[indices])
        for name, indices in (("train", train), ("val", val), ("test", test))
    }


def few_labels(labelled: int = 100, seed: int = 0) -> dict[str, TensorDataset]:
    """The same digits, as if somebody had labelled the first few of `train` only."""
    splits = digits(seed)
    x, y = splits["train"].tensors
    return {
        **splits,
        "train": TensorDataset(x[:labelled], y[:labelled]),
        "unlabelled": TensorDataset(x[labelled:]),
    }
