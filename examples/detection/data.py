"""Scenes of one to four of scikit-learn's digits, with a box around the ink of each."""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

HALF = 16  # pixels: a scene is 32 x 32, and each quarter holds one digit or none


class Scenes(Dataset):
    """One sample is (x, y): an image and a mapping of its boxes and labels, of any number."""

    def __init__(self, scans: torch.Tensor, digits: torch.Tensor, count: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (), generator=random))

        self.samples = []
        for _ in range(count):
            image, boxes, labels = torch.zeros(1, 2 * HALF, 2 * HALF), [], []
            for quarter in torch.randperm(4, generator=random)[: draw(1, 5)].tolist():
                chosen, size = draw(0, len(scans)), draw(9, HALF + 1)
                top = quarter // 2 * HALF + draw(0, HALF - size + 1)
                left = quarter % 2 * HALF + draw(0, HALF - size + 1)
                ink = interpolate(scans[chosen][None, None], size=size, mode="bilinear")[0, 0]
                image[0, top : top + size, left : left + size] = ink
                low, high = (ink > 0.3).nonzero().aminmax(dim=0)
                corner = low + torch.tensor([top, left])
                extent = high - low + 1
                # Centre and size in pixels: x, y, width, height.
                boxes.append(torch.cat([(corner + extent / 2).flip(0), extent.flip(0)]))
                labels.append(digits[chosen])
            self.samples.append(
                (image, {"boxes": torch.stack(boxes), "labels": torch.stack(labels)})
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return self.samples[index]


def splits() -> dict[str, Dataset]:
    bunch = load_digits()
    scans, digits = torch.tensor(bunch.images).float() / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(scans), generator=torch.Generator().manual_seed(0))
    train, val = order.split([1300, 497])  # no scan is in both
    return {
        "train": Scenes(scans[train], digits[train], count=1200, seed=1),
        "val": Scenes(scans[val], digits[val], count=200, seed=2),
    }
