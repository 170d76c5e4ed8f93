"""A graph is traced anew only where it must, and computes the same without writing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import ExportedProgram

from compress.common.signature import Signature, TensorSpec
from compress.graph.torch_export import export_program
from compress.quantization.pt2e.graph_capture import functionalize

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3, 8, 8)),))


class Network(nn.Module):
    def __init__(self, compute: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(8, 8)
        self.norm.running_mean += 1
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(self, x)


def residual(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(net.norm(net.conv(x)), inplace=True)
    y += 1
    return F.dropout(F.adaptive_avg_pool2d(y, 1), 0.5, False).flatten(1)


def attention(net: Any, x: torch.Tensor) -> torch.Tensor:
    queries, keys, values = net.linear(x.unflatten(1, (3, 1))).unbind(1)
    scores = F.scaled_dot_product_attention(queries, keys, values)
    return scores.transpose(1, 2).contiguous().view(x.shape[0], 8, -1)


def casts(net: Any, x: torch.Tensor) -> torch.Tensor:
    mask = (x > 0).to(torch.float64).contiguous()
    return (mask.to("cpu") * x).float().flatten(2) + x.mean().expand_as(x).flatten(-2)


def written_view(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.conv(x)
    y.view(-1, 4, 36).mul_(2)
    return y


def written_copy(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.float32, copy=True)
    y += 1
    z = x.to(memory_format=torch.channels_last)
    z *= 2
    return x * y + z


def in_pieces(net: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = net.conv(x).chunk(2, 1)
    return first * second


WRITTEN_OR_VIEWED = [written_view, written_copy, in_pieces]


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch's own, where it traces a graph anew
@pytest.mark.parametrize(
    "compute", [residual, attention, casts, written_view, written_copy, in_pieces]
)
def test_a_graph_is_traced_anew_only_where_it_must(
    compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Network(compute).eval()
    retrace, traced = ExportedProgram.run_decompositions, []
    expected = retrace(export_program(net, SIGNATURE), {})

    def count(*arguments: Any) -> ExportedProgram:
        traced.append(arguments)
        return retrace(*arguments)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", count)
    program = functionalize(export_program(net, SIGNATURE))
    assert bool(traced) == (compute in WRITTEN_OR_VIEWED)
    assert operators(program) == operators(expected)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(program.module()(x), net(x), rtol=0, atol=0)


def operators(program: ExportedProgram) -> Counter[str]:
    """Count the operators that compute numbers; a reshape may be a view of what it reads."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    views = {"aten.view.default", "aten._unsafe_view.default"}
    alike = ("aten.reshape.default" if name in views else name for name in names)
    return Counter(name for name in alike if not name.startswith("aten.sym_size"))
