"""A scan of scikit-learn's digits in noise, of another size and place in each image."""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, TensorDataset

SIZE = 16


def images(scans: torch.Tensor, digits: torch.Tensor, seed: int) -> TensorDataset:
    """Pixels (n, 1, 16, 16) and the class of each, (n, 16, 16): 0, or 1 + the digit."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(len(scans), 1, SIZE, SIZE, generator=random) * 0.3
    y = torch.zeros(len(scans), SIZE, SIZE, dtype=torch.int64)
    for i, (scan, digit) in enumerate(zip(scans, digits, strict=True)):
        size = int(torch.randint(10, SIZE + 1, (), generator=random))
        top, left = torch.randint(SIZE - size + 1, (2,), generator=random).tolist()
        window = (i, ..., slice(top, top + size), slice(left, left + size))
        ink = interpolate(scan[None, None], size=size, mode="bilinear")[0]
        x[window] = torch.maximum(x[window], ink)
        y[window] = (ink[0] > 0.5) * (digit + 1)
    return TensorDataset(x, y)


def splits() -> dict[str, Dataset]:
    bunch = load_digits()
    scans, digits = torch.tensor(bunch.images).float() / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(scans), generator=torch.Generator().manual_seed(0))
    parts = dict(zip(("train", "val", "test"), order.split([1200, 300, 297]), strict=True))
    return {name: images(scans[part], digits[part], seed=1) for name, part in parts.items()}
