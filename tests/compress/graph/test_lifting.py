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
from compress.quantization.pt2e.graph_capture import copy_graph

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


class Tied(nn.Module):
    """Returns an input, a parameter, and one tensor twice; one weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"user-item": nn.Linear(3, 3), "user_item": nn.Linear(3, 3)})
        self.parts["user_item"].weight = self.parts["user-item"].weight

    def forward(self, parts_user_item_bias: torch.Tensor, input: torch.Tensor) -> Any:
        x = self.parts["user_item"](self.parts["user-item"](parts_user_item_bias))
        return x, x, parts_user_item_bias, self.parts["user_item"].bias


def test_names_and_tensors_may_be_alike(tmp_path) -> None:
    torch.manual_seed(0)
    names = ("parts_user_item_bias", "input")
    signature = Signature(inputs=[TensorSpec(name=name, shape=("batch", 3)) for name in names])
    module = Tied().eval()
    graph = graph_of_program(export_program(module, signature))
    traces = counts.counted()["traces"]
    program = program_of_graph(graph, signature)
    assert counts.counted()["traces"] == traces
    save_program(program, tmp_path / "program.pt2")
    loaded = load_program(tmp_path / "program.pt2")
    x, unread = torch.randn(5, 3), torch.zeros(5, 3)
    for model in graph, program.module(), loaded.module():
        for expected, found in zip(module(x, unread), model(x, unread), strict=True):
            assert torch.equal(expected, found)


def test_functions_of_python_are_traced() -> None:
    _, graph = encoder()
    (rounded,) = graph.graph.find_nodes(op="call_function", target=aten.round.default)
    rounded.target = torch.round
    graph.recompile()
    program = program_of_graph(graph, SIGNATURE)
    assert any(node.target is aten.round.default for node in program.graph.nodes)


def test_what_fixes_a_size_is_told_of_each_copy() -> None:
    _, graph = encoder()
    (rounded,) = graph.graph.find_nodes(op="call_function", target=aten.round.default)
    rounded.target, rounded.args = aten.expand.default, (rounded.args[0], [2, 8, 4])
    graph.recompile()
    for copied in copy_graph(graph), copy_graph(graph):
        with pytest.raises(StageFailed, match="is baked in"):
            program_of_graph(copied, SIGNATURE)
