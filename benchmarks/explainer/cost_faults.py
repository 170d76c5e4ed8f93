"""Networks and faults of `benchmarks/explain_costs.py`: too slow, too large or wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

VOCABULARY = 3000


def data(tokens: bool = False) -> dict[str, TensorDataset]:
    """Return seeded samples: what is asked for is speed and size, which no training changes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(96, 3, 24, 24, generator=generator)
    if tokens:
        x = torch.randint(VOCABULARY, (96, 16), generator=generator)
    y = torch.randint(10, (96,), generator=generator)
    return {"train": TensorDataset(x[:64], y[:64]), "val": TensorDataset(x[64:], y[64:])}


class FakeQuantize(nn.Module):
    """What quantization-aware training leaves behind where it is not converted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)


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
            FakeQuantize() if fault == "fake" and i in (1, 2, 3) else nn.Identity()
            for i in range(layers)
        )
        self.activation = nn.Hardswish() if fault == "hardswish" else nn.ReLU()
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
        self.fake = FakeQuantize() if fault == "fake" else nn.Identity()
        self.activation = nn.Hardswish() if fault == "hardswish" else nn.ReLU()
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
    """A network and stages with a fault, and the same without it."""

    name: str
    cause: str
    """Empty for a clean control."""
    stage: str
    family: str
    gate: str
    """A gate of which the fault-free pipeline's value, a little weakened, is the limit."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Of the faulty network."""
    stages: tuple[dict[str, Any], ...] = ()
    """The faulty stages before the export."""
    clean_arguments: tuple[tuple[str, Any], ...] = ()
    clean_stages: tuple[dict[str, Any], ...] = ()
    export: dict[str, Any] = field(default_factory=dict)
    """Settings of the faulty export."""
    layers: tuple[str, ...] = ()
    """The guilty layers; empty where all are, or none."""
    times: float = 0.93
    """What the limit is of the fault-free pipeline's value."""


STATIC = {"name": "int8", "stage": "quantize_static", "calibration_samples": 32}
DYNAMIC = {"name": "int8", "stage": "quantize_dynamic"}
PRUNE = {"name": "pruned", "stage": "prune_channels", "calibration_samples": 0}
SPEED, SIZE, MEMORY = "min_speedup", "max_size", "max_memory"


def cost_faults() -> list[CostFault]:
    """Return all faults; those with an even place are the ones that thresholds were set on."""
    faults = []
    for family, layers in (
        ("chain", ("convs.2", "convs.1", "convs.3")),
        ("residual", ("conv2.1", "conv1.0", "conv1.2")),
    ):
        for layer in layers:
            faults.append(
                CostFault(
                    "island",
                    "float_islands",
                    "int8",
                    family,
                    SPEED,
                    stages=({**STATIC, "exclude": [layer]},),
                    clean_stages=(STATIC,),
                    layers=(layer,),
                )
            )
    for family in ("chain", "residual"):
        for width in (48, 64, 96):
            size = (("width", width),)
            faults.append(
                CostFault(
                    "fake quantization",
                    "lone_pairs",
                    "onnx",
                    family,
                    SPEED,
                    (*size, ("fault", "fake")),
                    clean_arguments=size,
                )
            )
        faults += [
            CostFault(
                "16 bits",
                "lone_pairs",
                "int8",
                family,
                SPEED,
                (("width", width),),
                ({**STATIC, "activation_bits": 16},),
                (("width", width),),
                (STATIC,),
            )
            for width in (48, 64)
        ]
        faults += [
            CostFault(
                f"width {kept} of {width}",
                "odd_widths",
                "pruned",
                family,
                SPEED,
                (("width", width),),
                ({**PRUNE, "ratio": 1 - kept / width, "round_to": 1},),
                (("width", width),),
                ({**PRUNE, "ratio": 1 - rounded / width, "round_to": 16},),
            )
            for width, kept, rounded in ((48, 33, 32), (64, 49, 48), (96, 65, 64), (64, 34, 32))
        ]
        faults += [
            CostFault(
                kind,
                "unfused",
                "onnx",
                family,
                SPEED,
                (("width", width), ("fault", kind)),
                clean_arguments=(("width", width),),
            )
            for kind, width in (("norm", 48), ("hardswish", 48), ("norm", 32), ("hardswish", 32))
        ]
    faults += [
        CostFault(
            "tiny", "call_overhead", "onnx", family, SPEED, size, clean_arguments=size, times=3.0
        )
        for family, size in (
            ("chain", (("width", 1), ("layers", 1))),
            ("tokens", (("width", 2), ("blocks", 1))),
            ("chain", (("width", 2), ("layers", 1))),
            ("tokens", (("width", 4), ("blocks", 1))),
        )
    ]
    faults += [
        CostFault("tie", "noise", "onnx", family, SPEED, size, clean_arguments=size, times=1.001)
        for family, size in (
            ("chain", (("width", 32),)),
            ("residual", (("width", 32),)),
            ("chain", (("width", 64),)),
            ("tokens", (("width", 64),)),
        )
    ]
    for width in (64, 48, 96, 32):
        size = (("width", width),)
        faults += [
            CostFault(
                "table in float",
                "float_tables",
                "int8",
                "tokens",
                SIZE,
                size,
                ({**DYNAMIC, "embeddings": False},),
                size,
                (DYNAMIC,),
                layers=("table",),
                times=1.05,
            ),
            CostFault(
                "table twice",
                "stored_twice",
                "onnx",
                "tokens",
                SIZE,
                (*size, ("fault", "twice")),
                clean_arguments=size,
                layers=("second",),
                times=1.05,
            ),
            CostFault(
                "layer left out",
                "excluded_layers",
                "int8",
                "chain",
                SIZE,
                size,
                ({**STATIC, "exclude": ["convs.2"]},),
                size,
                (STATIC,),
                layers=("convs.2",),
                times=1.05,
            ),
            CostFault(
                "layer kept",
                "excluded_layers",
                "pruned",
                "residual",
                SIZE,
                size,
                ({**PRUNE, "ratio": 0.5, "exclude": ["conv1.1"]},),
                size,
                ({**PRUNE, "ratio": 0.5},),
                layers=("conv1.1",),
                times=1.02,
            ),
        ]
    faults += [
        CostFault(
            f"image x {scale}",
            "large_activation",
            "onnx",
            "large",
            MEMORY,
            (("scale", scale), ("width", width)),
            clean_arguments=(("width", width),),
            layers=("wide",),
            times=1.5,
        )
        for scale, width in ((8, 24), (10, 16), (12, 24), (8, 32))
    ]
    return faults


def clean_controls() -> list[CostFault]:
    """Return networks without a fault, of which more is asked than they can give."""
    return [
        CostFault("clean", "", "", family, gate, size, stages, size, stages, times=times)
        for family, gate, size, stages, times in (
            ("chain", SPEED, (("width", 48),), (), 2.0),
            ("residual", SPEED, (("width", 64),), (), 2.0),
            ("chain", SPEED, (("width", 64),), ({**PRUNE, "ratio": 0.5},), 2.0),
            ("residual", SPEED, (("width", 96),), ({**PRUNE, "ratio": 0.5},), 2.0),
            ("chain", SPEED, (("width", 96),), (STATIC,), 2.0),
            ("residual", SPEED, (("width", 96),), (STATIC,), 2.0),
            ("tokens", SIZE, (("width", 64),), (DYNAMIC,), 0.7),
            ("chain", SIZE, (("width", 48),), (STATIC,), 0.7),
            ("residual", SIZE, (("width", 64),), ({**PRUNE, "ratio": 0.5},), 0.7),
            ("large", MEMORY, (("width", 24),), (), 0.5),
        )
    ]
