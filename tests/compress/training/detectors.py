"""A detector of two outputs, images with different numbers of boxes, and a loss of its own."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

QUERIES, CLASSES = 3, 2


class Detector(nn.Module):
    """Returns scores of the classes and of "no object", and a box, for each of three queries."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 32)
        self.scores = nn.Linear(32, QUERIES * (CLASSES + 1))
        self.boxes = nn.Linear(32, QUERIES * 4)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.hidden(features).relu()
        return {
            "logits": self.scores(hidden).view(-1, QUERIES, CLASSES + 1),
            "pred_boxes": self.boxes(hidden).view(-1, QUERIES, 4).sigmoid(),
        }


class Images(Dataset):
    """Samples with one to three boxes, at places that follow from the features."""

    def __init__(self, samples: int, seed: int) -> None:
        self.x = torch.rand(samples, 4, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x = self.x[index]
        count = 1 + int(x[0] * 3)
        centres = 0.2 + 0.3 * torch.arange(count)
        boxes = torch.stack(
            [centres, centres, torch.full((count,), 0.2), 0.2 + 0.2 * x[1:2].expand(count)], 1
        )
        return x, {"boxes": boxes, "labels": torch.arange(count) % CLASSES}


def data(samples: int = 64) -> dict[str, Dataset]:
    return {"train": Images(samples, 0), "val": Images(samples // 2, 1)}


def loss(outputs: dict[str, torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Box i of an image belongs to query i; the other queries answer "no object"."""
    losses = []
    for logits, boxes, target in zip(
        outputs["logits"], outputs["pred_boxes"], targets, strict=True
    ):
        count = len(target["labels"])
        labels = F.pad(target["labels"], (0, QUERIES - count), value=CLASSES)
        losses.append(
            F.cross_entropy(logits, labels) + 5 * F.l1_loss(boxes[:count], target["boxes"])
        )
    return torch.stack(losses).mean()


def largest_error(
    outputs: dict[str, torch.Tensor], targets: list[dict[str, torch.Tensor]]
) -> float:
    """A metric of all outputs: the largest distance of a coordinate."""
    pairs = zip(outputs["pred_boxes"], targets, strict=True)
    return max(float((own[: len(y["boxes"])] - y["boxes"]).abs().max()) for own, y in pairs)
