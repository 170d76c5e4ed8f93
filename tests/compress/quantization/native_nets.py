"""Networks written for torch.ao's eager mode, or such as its FX mode misreads."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.ao.nn.quantized import FloatFunctional
from torch.ao.quantization import DeQuantStub, QuantStub, fuse_modules, fuse_modules_qat


class Stubs(nn.Module):
    """Says where integers begin and end, and which layers are one."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant, self.functional = QuantStub(), DeQuantStub(), FloatFunctional()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.tail = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(self.quant(image))))
        x = self.functional.add(x, self.tail(x))
        return self.dequant(self.head(x.mean((2, 3))))

    def fuse_model(self, is_qat: bool = False) -> None:
        fuse = fuse_modules_qat if is_qat else fuse_modules
        fuse(self, ["conv", "bn", "relu"], inplace=True)


class PlainAddition(Stubs):
    """Adds with an operator, which eager mode has no kernel for."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.quant(image))
        return self.dequant(self.head((x + self.tail(x)).mean((2, 3))))

    def fuse_model(self) -> None:
        """Fuse nothing."""


class Subtraction(nn.Module):
    """Adds a product with a factor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.first(x), self.second(x), alpha=-3)


class Inputs(nn.Module):
    """Two inputs, one of which a functional linear layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))
        self.other = nn.Linear(4, 6)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": F.linear(a, self.weight, self.bias) + self.other(b)}


stubs, plain_addition, subtraction, inputs = Stubs, PlainAddition, Subtraction, Inputs
