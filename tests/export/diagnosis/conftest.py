"""A network that is profiled, and the same one with a rounding left behind."""

import pytest

from compress.artifacts.eager_model import EagerModel
from tests.export.builders import IMAGE, network_of

NETS = """
import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor
from torch import nn

class Net(nn.Module):
    def __init__(self, rounds=False):
        super().__init__()
        self.stem, self.inner = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 4)
        self.rounds = rounds

    def forward(self, image):
        x = self.stem(image).relu()
        if self.rounds:
            grid = (0.05, 0, -128, 127, torch.int8)
            x = torch.ops.quantized_decomposed.quantize_per_tensor(x, *grid)
            x = torch.ops.quantized_decomposed.dequantize_per_tensor(x, *grid)
        x = self.last(self.norm(self.inner(x).relu())).relu()
        return self.head(x.mean((2, 3)))

def rounding():
    return Net(rounds=True)
"""


@pytest.fixture(scope="package")
def net(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("net")
    return network_of(folder, NETS, "profiled:Net", IMAGE)


@pytest.fixture(scope="package")
def rounding(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("rounding")
    return network_of(folder, NETS, "rounding:rounding", IMAGE)
