"""Factories of the fetched architectures, for `model.factory`; weights come by `checkpoint`."""

import ast
import importlib
import sys
from pathlib import Path

import torch
from torch import nn


def efficientnet(packages: str, name: str) -> nn.Module:
    """Return an EfficientNet-Lite for images of `efficientnet_size`."""
    package = _import(packages, "efficientnet_lite_pytorch")
    return package.EfficientNet.from_name(name)


def detector(packages: str, name: str) -> nn.Module:
    """Return a network of MTCNN: PNet, RNet or ONet, which give boxes and probabilities."""
    # The package itself imports torchvision; its three networks need torch alone.
    file = Path(packages, "facenet_pytorch", "models", "mtcnn.py")
    return _class_of(file, name, {"torch": torch, "nn": nn})(pretrained=False)


class SpeakerEncoder(nn.Module):
    """Resemblyzer's encoder of mel spectrograms."""

    def __init__(self) -> None:
        super().__init__()
        # As in Resemblyzer 0.1.4, whose module imports packages for sound.
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        self.relu = nn.ReLU()

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = self.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def mobilenet_v2() -> nn.Module:
    """Return a network of MobileNetV2's shape, whose BatchNorms are those of seeded weights."""
    from shapes import mobilenet_v2

    torch.manual_seed(0)
    return mobilenet_v2()


def resnet18() -> nn.Module:
    """Return a network of ResNet-18's shape, whose BatchNorms are those of seeded weights."""
    from shapes import resnet18

    torch.manual_seed(0)
    return resnet18()


def resnet50() -> nn.Module:
    """Return a network of ResNet-50's shape, whose BatchNorms are those of seeded weights."""
    from shapes import resnet50

    torch.manual_seed(0)
    return resnet50()


def efficientnet_size(name: str) -> int:
    """Return the side of the images that an EfficientNet-Lite was trained on."""
    return {"efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}[name]


def _import(packages: str, name: str):
    if packages not in sys.path:
        sys.path.append(packages)
    return importlib.import_module(name)


def _class_of(file: Path, name: str, names: dict):
    """Return a class of a module whose imports are not run."""
    tree = ast.parse(file.read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    exec(compile(tree, file, "exec"), names)
    return names[name]
