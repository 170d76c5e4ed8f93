"""As in a notebook: a trained module in memory becomes a small ONNX file, with no other file.

Run it anywhere: python examples/notebook.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compress


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU()
        )
        self.classes = nn.Linear(32 * 9, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classes(self.features(image).flatten(1))


def main(folder: Path) -> None:
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    data = TensorDataset(images, torch.tensor(labels))
    train, val = torch.utils.data.random_split(data, [1400, 397])
    loader = DataLoader(train, batch_size=64, shuffle=True)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    small = compress.prune_channels(model, ratio=0.5, data=loader)
    small = compress.quantize_static(small, calibration=loader, val=val)
    onnx = compress.export_onnx(small, folder / "model.onnx")

    x = torch.stack([image for image, _ in val])
    y = torch.tensor([label for _, label in val])
    for name, module in {"model": model.eval(), "int8": small.module, "ONNX": onnx.module}.items():
        print(f"{name}: accuracy {(module(x).argmax(1) == y).float().mean():.3f}")
    print(f"{folder / 'model.onnx'}: {onnx.payload_bytes} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()))
