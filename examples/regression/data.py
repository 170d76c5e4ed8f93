"""scikit-learn's diabetes data: 442 patients, ten measurements, and the disease a year later."""

import torch
from sklearn.datasets import load_diabetes
from torch.utils.data import Dataset, TensorDataset, random_split


def splits() -> dict[str, Dataset]:
    # Scaled: int8 has one range for all inputs, and each column's own unit would not share it.
    features, progression = load_diabetes(return_X_y=True, scaled=True)
    x = torch.tensor(features).float() * len(features) ** 0.5  # mean 0, standard deviation 1
    y = torch.tensor(progression).float().reshape(-1, 1) / 100  # (n, 1), as the outputs
    parts = random_split(TensorDataset(x, y), [262, 90, 90], torch.Generator().manual_seed(0))
    return dict(zip(("train", "val", "test"), parts, strict=True))
