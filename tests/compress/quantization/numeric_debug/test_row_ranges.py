"""With a range for each row, a batch has the outputs that its rows have alone."""

from pathlib import Path

import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.quantization.numeric_debug.compare import choose_ranges_by_row_, has_call_ranges
from compress.quantization.stages.dynamic import QuantizeDynamic

NETS = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self, joined):
        super().__init__()
        torch.manual_seed(0)
        self.joined = joined
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        if self.joined:
            x = x.reshape(-1, 8)
        return self.second(self.first(x).relu()).reshape(-1, 4, 3).mean(1)
"""


def quantized(tmp_path: Path, joined: bool):
    (tmp_path / "rownets.py").write_text(NETS)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4, 8)),))
    recipe = Recipe(factory="rownets:Tokens", arguments={"joined": joined})
    weights = recipe.build(tmp_path).state_dict()
    model = EagerModel.create(tmp_path / "source", recipe, weights, signature, folder=tmp_path)
    x = torch.randn(16, 4, 8)
    context = Context(root=tmp_path / "int8", data=Splits({"val": list(x)}))
    return QuantizeDynamic()(model, context).program().module(check_guards=False)


def test_rows_of_a_batch_have_the_outputs_that_they_have_alone(tmp_path: Path) -> None:
    graph = quantized(tmp_path, joined=False)
    sizes = torch.tensor([1.0, 1000.0, 0.0, 0.01, 30.0])[:, None, None]
    x = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1)) * sizes
    alone = torch.cat([graph(row[None]) for row in x])
    assert (graph(x) - alone).abs().max() > 0.1 * alone[0].abs().max()
    assert has_call_ranges(graph) and choose_ranges_by_row_(graph) and not has_call_ranges(graph)
    assert torch.allclose(graph(x), alone, rtol=1e-5, atol=1e-6)


def test_a_graph_that_joins_rows_stays_as_it_is(tmp_path: Path) -> None:
    graph = quantized(tmp_path, joined=True)
    x = torch.randn(5, 4, 8)
    expected = graph(x)
    assert not choose_ranges_by_row_(graph) and has_call_ranges(graph)
    graph.recompile()
    assert torch.equal(graph(x), expected)
