"""A one-stage detector: each of 4 x 4 cells of the image says which digit has its centre there."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss

CELL, CELLS = 8, 4  # pixels of a cell, cells of a row
NOTHING = 10  # the class after the digits


class Detector(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers, channels = [], 1
        for factor, stride in ((1, 1), (2, 2), (4, 2), (4, 2), (4, 1)):
            layers.append(nn.Conv2d(channels, factor * width, 3, stride, padding=1, bias=False))
            layers += [nn.BatchNorm2d(factor * width), nn.ReLU()]
            channels = factor * width
        self.features = nn.Sequential(*layers)
        self.classes = nn.Conv2d(channels, NOTHING + 1, 1)
        self.boxes = nn.Conv2d(channels, 4, 1)
        centres = (torch.arange(CELLS) + 0.5) * CELL
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        size = torch.full_like(x, 1.5 * CELL)
        self.register_buffer("origin", torch.stack([x, y, size, size]))

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (n, 16, 11) and boxes (n, 16, 4) as centre and size in pixels."""
        features = self.features(image)
        boxes = self.origin + CELL * self.boxes(features)
        return self.classes(features).flatten(2).mT, boxes.flatten(2).mT


def loss(outputs: dict[str, torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Compare each cell's class, and the box of each cell that has a digit."""
    logits, boxes = outputs["logits"], outputs["pred_boxes"]
    expected = torch.full(logits.shape[:2], NOTHING, device=logits.device)
    images, cells, true_boxes = [], [], []
    for i, target in enumerate(targets):
        column, row = (target["boxes"][:, :2] // CELL).long().unbind(1)
        expected[i, row * CELLS + column] = target["labels"]
        images.append(torch.full_like(row, i))
        cells.append(row * CELLS + column)
        true_boxes.append(target["boxes"])
    found = boxes[torch.cat(images), torch.cat(cells)]
    distance = l1_loss(found, torch.cat(true_boxes).to(found), reduction="sum")
    return cross_entropy(logits.mT, expected) * 10 + distance / CELL / len(logits)
