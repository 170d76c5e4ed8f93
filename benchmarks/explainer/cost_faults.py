"""Networks and faults of `benchmarks/explain_costs.py`: too slow, too large or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 3000


def data(tokens: bool = False) -> dict[str, TensorDataset]:
    """Return seeded samples: what is asked for is speed and size, which no training changes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(96, 3, 24, 24, generator=generator)
    if tokens:
        x = torch.randint(VOCABULARY, (96, 16), generator=generator)
    y = torch.randint(10, (96,), generator=generator)
    return {"train": TensorDataset(x[:64], y[:64]), "val": TensorDataset(x[64:], y[64:])}


class Rounding(nn.Module):
    """What quantization-aware training leaves behind where it is not converted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = (0.05, 0, -128, 127, torch.int8)
        rounded = torch.ops.quantized_decomposed.quantize_per_tensor(x, *grid)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(rounded, *grid)


class Chain(nn.Module):
    """Convolutions one after another; of 2 or 3 stages."""

    def __init__(self, width: int = 48, layers: int = 5, fault: str = "") -> None:
        super().__init__()
        widths = [3, *[width] * layers]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1 if i else 2, 1) for i, (a, b) in enumerate(pairwise(widths))
        )
        norm = fault == "norm"
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) if norm else nn.Identity() for b in widths[1:])
        self.fakes = nn.ModuleList(
            Rounding() if fault == "rounding" else nn.Identity() for i in range(layers)
        )
        self.activation = nn.GELU() if fault == "gelu" else nn.ReLU()
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image
        for conv, norm, fake in zip(self.convs, self.norms, self.fakes, strict=True):
            # Normalised after the activation, where no kernel takes it in.
            x = fake(norm(self.activation(conv(x))))
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    """Blocks of two convolutions, each added to what it reads."""

    def __init__(self, width: int = 48, blocks: int = 3, fault: str = "") -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.conv1 = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(blocks))
        self.conv2 = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(blocks))
        norm = fault == "norm"
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(width) if norm else nn.Identity() for _ in range(blocks)
        )
        self.fake = Rounding() if fault == "rounding" else nn.Identity()
        self.activation = nn.GELU() if fault == "gelu" else nn.ReLU()
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.stem(image))
        for conv1, conv2, norm in zip(self.conv1, self.conv2, self.norms, strict=True):
            inner = self.fake(self.activation(conv1(norm(x))))
            x = self.fake(self.activation(x + conv2(inner)))
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """A table of embeddings, and linear layers."""

    def __init__(self, width: int = 64, blocks: int = 2, fault: str = "") -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.second = nn.Embedding(VOCABULARY, width) if fault == "twice" else None
        if self.second is not None:
            self.second.weight.data.copy_(self.table.weight.data)
        self.fc1 = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.fc2 = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        if self.second is not None:
            x = x + self.second(tokens.flip(1))
        for fc1, fc2 in zip(self.fc1, self.fc2, strict=True):
            x = x + fc2(F.relu(fc1(x)))
        return self.head(x.mean(1))


class Large(nn.Module):
    """A convolution on an image that was made larger."""

    def __init__(self, width: int = 24, scale: int = 1, fault: str = "") -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=scale) if scale > 1 else nn.Identity()
        self.wide = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.Conv2d(width, width, 3, 4, 1)
        self.fc1 = nn.Linear(width, 1024)
        self.head = nn.Linear(1024, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.down(F.relu(self.wide(self.up(image))))
        return self.head(F.relu(self.fc1(F.relu(x).mean((2, 3)))))


FAMILIES = {"chain": Chain, "residual": Residual, "tokens": Tokens, "large": Large}


def net(family: str, **arguments: Any) -> nn.Module:
    """Return a seeded network of a family, in eval mode."""
    torch.manual_seed(0)
    return FAMILIES[family](**arguments).eval()


@dataclass(frozen=True)
class CostFault:
    """A network and stages with a fault, and a gate that refuses them."""

    name: str
    cause: str
    """Empty for a clean control."""
    stage: str
    family: str
    gate: str
    times: float
    """What the gate's limit is of the value that the pipeline has with the usual stages."""
    stages: tuple[dict[str, Any], ...] = ()
    """Those before the export, with the fault."""
    usual_stages: tuple[dict[str, Any], ...] | None = None
    """The same without it; None where the network has the fault."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Of the network."""
    layer: str = ""
    """The guilty layer; empty where all are, or none."""


STATIC = {"name": "int8", "stage": "quantize_static", "calibration_samples": 32}
DYNAMIC = {"name": "int8", "stage": "quantize_dynamic"}
PRUNE = {"name": "pruned", "stage": "prune_channels", "calibration_samples": 0}
SPEED, SIZE, MEMORY = "min_speedup", "max_size", "max_memory"
PARAMETERS, INTEGERS = "max_parameters", "min_integer_macs"
LESS = 0.93
"""Of a speedup with other settings."""
MORE = 1.15
"""Of a speedup with the fault."""


def cost_faults() -> list[CostFault]:
    """Return sixty faults of speed, size and memory, and twenty of weights and kernels."""
    return [*_of_settings(), *_of_networks(), *_of_size(), *_of_counts()]


def _of_settings() -> Iterator[CostFault]:
    places = {
        "chain": ("convs.2", "convs.1", "convs.3"),
        "residual": ("conv2.1", "conv1.0", "conv1.2"),
    }
    for family, layers in places.items():
        for layer in layers:
            island = ({**STATIC, "exclude": [layer]},)
            yield CostFault(
                "island", "float_islands", "int8", family, SPEED, LESS, island, (STATIC,), (), layer
            )
        for width in (48, 32):
            coarse = ({**STATIC, "activation_bits": 16},)
            size = (("width", width),)
            yield CostFault(
                "16 bits", "lone_pairs", "int8", family, SPEED, LESS, coarse, (STATIC,), size
            )
        for width, kept, rounded in ((48, 33, 32), (64, 49, 48), (96, 65, 64), (64, 34, 32)):
            odd = ({**PRUNE, "ratio": 1 - kept / width, "round_to": 1},)
            even = ({**PRUNE, "ratio": 1 - rounded / width},)
            size = (("width", width),)
            yield CostFault(
                f"width {kept}", "odd_widths", "pruned", family, SPEED, LESS, odd, even, size
            )


def _of_networks() -> Iterator[CostFault]:
    for family in ("chain", "residual"):
        for width in (16, 24, 32):
            size = (("width", width), ("fault", "rounding"))
            yield CostFault(
                "rounding left", "lone_pairs", "onnx", family, SPEED, MORE, arguments=size
            )
        for kind, width in (("norm", 16), ("gelu", 16), ("norm", 24), ("gelu", 24)):
            size = (("width", width), ("fault", kind))
            yield CostFault(kind, "unfused", "onnx", family, SPEED, MORE, arguments=size)
    tiny = [("chain", 1, "layers"), ("tokens", 2, "blocks"), ("chain", 2, "layers")]
    for family, width, depth in (*tiny, ("tokens", 4, "blocks")):
        size = (("width", width), (depth, 1))
        yield CostFault("tiny", "call_overhead", "onnx", family, SPEED, 2.0, arguments=size)
    for family, width in (("chain", 32), ("residual", 32), ("chain", 64), ("tokens", 64)):
        size = (("width", width),)
        yield CostFault("tie", "noise", "onnx", family, SPEED, 1.001, arguments=size)
    for scale, width in ((8, 24), (10, 16), (12, 24), (8, 32)):
        size = (("scale", scale), ("width", width))
        yield CostFault(
            "large image",
            "large_activation",
            "onnx",
            "large",
            MEMORY,
            0.7,
            arguments=size,
            layer="wide",
        )


def _of_size() -> Iterator[CostFault]:
    for width in (64, 48, 96, 32):
        size = (("width", width),)
        left = ({**DYNAMIC, "embeddings": False},)
        yield CostFault(
            "table in float",
            "float_tables",
            "int8",
            "tokens",
            SIZE,
            1.05,
            left,
            (DYNAMIC,),
            size,
            "table",
        )
        twice = (*size, ("fault", "twice"))
        yield CostFault(
            "table twice",
            "stored_twice",
            "onnx",
            "tokens",
            SIZE,
            0.9,
            arguments=twice,
            layer="second",
        )
        left = ({**STATIC, "exclude": ["convs.2"]},)
        yield CostFault(
            "layer left out",
            "excluded_layers",
            "int8",
            "chain",
            SIZE,
            1.05,
            left,
            (STATIC,),
            size,
            "convs.2",
        )
        half = {**PRUNE, "ratio": 0.5}
        yield CostFault(
            "layer kept",
            "excluded_layers",
            "pruned",
            "residual",
            SIZE,
            1.02,
            ({**half, "exclude": ["conv1.1"]},),
            (half,),
            size,
            "conv1.1",
        )


def _of_counts() -> Iterator[CostFault]:
    """Yield faults of what needs no clock: weights that are left, and products in integers."""
    places = {"chain": ("convs.2", "convs.3"), "residual": ("conv1.1", "conv2.2")}
    half = {**PRUNE, "ratio": 0.5}
    coarse = {**STATIC, "activation_bits": 16}
    for family, layers in places.items():
        for layer, width in product(layers, (32, 64)):
            size = (("width", width),)
            left = ({**STATIC, "exclude": [layer]},)
            yield CostFault(
                "in float",
                "excluded_layers",
                "int8",
                family,
                INTEGERS,
                LESS,
                left,
                (STATIC,),
                size,
                layer,
            )
        for width in (32, 64):
            size = (("width", width),)
            kept = ({**half, "exclude": [layers[0]]},)
            yield CostFault(
                "all channels",
                "excluded_layers",
                "pruned",
                family,
                PARAMETERS,
                1.02,
                kept,
                (half,),
                size,
                layers[0],
            )
            yield CostFault(
                "too many bits",
                "float_kernels",
                "int8",
                family,
                INTEGERS,
                LESS,
                (coarse,),
                (STATIC,),
                size,
            )
    for width, bits in product((32, 64), (4, 8)):
        packed = {"name": "int8", "stage": "quantize_weights", "bits": bits}
        size = (("width", width),)
        floats = ({**packed, "activation_bits": 32},)
        yield CostFault(
            "float inputs",
            "float_kernels",
            "int8",
            "tokens",
            INTEGERS,
            LESS,
            floats,
            (packed,),
            size,
        )


def clean_controls() -> list[CostFault]:
    """Return networks without a fault, of which more is asked than they can give."""
    half = {**PRUNE, "ratio": 0.5}
    return [
        CostFault("clean", "", "", family, gate, times, stages, arguments=(("width", width),))
        for family, gate, width, stages, times in (
            ("chain", SPEED, 48, (), 2.0),
            ("residual", SPEED, 64, (), 2.0),
            ("chain", SPEED, 64, (half,), 2.0),
            ("residual", SPEED, 96, (half,), 2.0),
            ("chain", SPEED, 96, (STATIC,), 2.0),
            ("residual", SPEED, 96, (STATIC,), 2.0),
            ("tokens", SIZE, 64, (DYNAMIC,), 0.7),
            ("chain", SIZE, 48, (STATIC,), 0.7),
            ("residual", SIZE, 64, (half,), 0.7),
            ("large", MEMORY, 24, (), 0.5),
            ("residual", PARAMETERS, 64, (half,), 0.7),
            ("chain", PARAMETERS, 48, (half,), 0.7),
        )
    ]
