"""A graph that came from a trace and was changed is a program without another trace."""

from typing import Any

import pytest
import torch
from torch import nn

from compress.common import counts
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.graph.lifting import graph_of_program, program_of_graph
from compress.graph.torch_export import export_program, load_program, save_program

aten = torch.ops.aten
SIGNATURE = Signature(inputs=(TensorSpec(name="ids", shape=("batch", "length"), dtype="int64"),))


class Encoder(nn.Module):
    """Reads a parameter, a table of fixed length, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(16, 4), nn.Linear(4, 4)
        self.register_buffer("positions", torch.randn(12, 4), persistent=False)
        self.factors = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(self.table(ids) + self.positions[: ids.shape[1]])
        return x * self.factors, x.flatten(1)


def encoder() -> tuple[Any, torch.fx.GraphModule]:
    torch.manual_seed(0)
    program = export_program(Encoder().eval(), SIGNATURE)
    graph = graph_of_program(program)
    (linear,) = graph.graph.find_nodes(op="call_function", target=aten.linear.default)
    with graph.graph.inserting_after(linear):
        rounded = graph.graph.call_function(aten.round.default, (linear,))
    linear.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)
    graph.recompile()
    return program, graph


def test_a_changed_graph_is_saved_without_a_trace(tmp_path) -> None:
    before, graph = encoder()
    traces = counts.counted()["traces"]
    program = program_of_graph(graph, SIGNATURE)
    assert counts.counted()["traces"] == traces
    assert program.range_constraints == before.range_constraints
    save_program(program, tmp_path / "program.pt2")
    loaded = load_program(tmp_path / "program.pt2")
    ids = torch.arange(33).view(3, 11) % 16
    for a, b, c in zip(graph(ids), program.module()(ids), loaded.module()(ids), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with pytest.raises(RuntimeError, match="12"):
        loaded.module()(torch.zeros(3, 13, dtype=torch.int64))
    assert loaded.state_dict.keys() == {"table.weight", "linear.weight", "linear.bias"}


def test_functions_of_python_are_traced() -> None:
    _, graph = encoder()
    (rounded,) = graph.graph.find_nodes(op="call_function", target=aten.round.default)
    rounded.target = torch.round
    graph.recompile()
    program = program_of_graph(graph, SIGNATURE)
    assert any(node.target is aten.round.default for node in program.graph.nodes)


def test_what_fixes_a_size_is_told() -> None:
    _, graph = encoder()
    (rounded,) = graph.graph.find_nodes(op="call_function", target=aten.round.default)
    rounded.target, rounded.args = aten.expand.default, (rounded.args[0], [2, 8, 4])
    graph.recompile()
    with pytest.raises(StageFailed, match="is baked in"):
        program_of_graph(graph, SIGNATURE)
