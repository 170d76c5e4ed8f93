"""Ill-conditioned networks that round each activation to 8 bits, and their float models."""

from pathlib import Path

import torch

from compress.artifacts.artifact import Step
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.graph.torch_export import export_program
from tests.export.builders import network_of

NETS = """
import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor
from torch import nn

class Net(nn.Module):
    def __init__(self, rounds=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range({depth}))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std={gain} / 32**0.5)
        self.head, self.rounds = nn.Linear(32, 8), rounds

    def round(self, x):
        if not self.rounds:
            return x
        grid = (1 / 127, 0, -128, 127, torch.int8)
        x = torch.ops.quantized_decomposed.quantize_per_tensor(x, *grid)
        return torch.ops.quantized_decomposed.dequantize_per_tensor(x, *grid)

    def forward(self, x):
        x = self.round(torch.nn.functional.pad(x, (0, 28)))
        for layer in self.layers:
            x = self.round(torch.tanh(layer(x)))
        return self.head(x)

def net(rounds=True):
    torch.manual_seed({seed})
    return Net(rounds)

def plain():
    return net(rounds=False)
"""


def rounded_net(
    folder: Path, depth: int, gain: float, seed: int = 0
) -> tuple[GraphModel, EagerModel]:
    """Return a graph that rounds, and the model with the same weights that does not."""
    folder.mkdir(exist_ok=True)
    source = NETS.format(depth=depth, gain=gain, seed=seed)
    name = f"rounded_{depth}_{seed}"
    floats = network_of(folder, source, f"{name}:plain")
    rounded = network_of(folder, source, f"{name}:net")
    step = Step(stage="quantize_static", settings={}, inputs={"input": floats.digest})
    program = export_program(rounded.load(), rounded.signature)
    graph = GraphModel.create(folder / "graph", program, rounded.signature, lineage=(step,))
    return graph, floats


def disturbed_rows(count: int = 128) -> list[tuple[torch.Tensor]]:
    """Return seeded rows in batches of 32."""
    rows = 2 * torch.rand(count, 4, generator=torch.Generator().manual_seed(1)) - 1
    return [(part,) for part in rows.split(32)]
