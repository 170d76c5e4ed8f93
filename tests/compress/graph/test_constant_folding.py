"""What depends on weights alone is computed once, and answers stay what they were."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from compress.artifacts.graph_model import GraphModel
from compress.core.context import Context
from compress.graph import constant_folding
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import build_model, labelled_images

aten = torch.ops.aten


class CountedOperators(TorchDispatchMode):
    """Counts the calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> GraphModel:
    folder = tmp_path_factory.mktemp("folding")
    model = build_model(folder / "source", "networks:mlp")
    context = Context(root=folder / "int8", data=labelled_images())
    return QuantizeStatic(calibration_samples=64)(model, context)


def test_an_opened_graph_dequantizes_its_weights_once(quantized: GraphModel) -> None:
    (x,) = quantized.signature.example(batch=3)
    expected = quantized.load()(x)
    dequantize = "quantized_decomposed::dequantize_per_channel"
    constants = 3 + 3  # weights and biases
    with CountedOperators() as operators, quantized.open() as predict:
        assert operators.calls[dequantize] == constants
        for _ in range(2):
            assert torch.equal(predict(x)[0], expected)
    assert operators.calls[dequantize] == constants


ROUND = "quantized_decomposed::quantize_per_tensor"


def test_an_opened_graph_rounds_in_one_step(quantized: GraphModel) -> None:
    (x,) = quantized.signature.example(batch=3)
    x[0, 0], x[1, 0], x[2, 0] = torch.nan, torch.inf, -torch.inf
    with CountedOperators() as operators:
        expected = quantized.load()(x)
    assert operators.calls[ROUND]
    with CountedOperators() as operators, quantized.open() as predict:
        assert torch.equal(predict(x)[0], expected)
    assert not operators.calls[ROUND]


class Rounds(nn.Module):
    """Rounds to integers, of which more is read than what they stand for."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        limits = (0.1, 3, -128, 127, torch.int8)
        integers = torch.ops.quantized_decomposed.quantize_per_tensor(x, *limits)
        dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor
        first, second = dequantize(integers, *limits), dequantize(integers, *limits)
        if self.reader == "another operator":
            return first, second, integers + 1
        if self.reader == "another scale":
            return first, dequantize(integers, 0.2, *limits[1:])
        return first, second.mul_(2)


@pytest.mark.parametrize("reader", ["another operator", "another scale", "in place"])
def test_integers_that_are_read_otherwise_stay(reader: str) -> None:
    x = torch.linspace(-20, 20, 99)
    graph: Any = torch.export.export(Rounds(reader), (x,)).module()
    expected = graph(x)
    constant_folding.fuse_rounding_(graph)
    assert all(map(torch.equal, graph(x), expected))


def rounded_to(scale: float, x: torch.Tensor) -> torch.Tensor:
    limits = (scale, 3, -128, 127, torch.int8)
    integers = torch.ops.quantized_decomposed.quantize_per_tensor(x, *limits)
    return torch.ops.quantized_decomposed.dequantize_per_tensor(integers, *limits)


class Activated(nn.Module):
    """A convolution that its activation reads: alone, with an addition, or in place with it."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.conv, self.reader = nn.Conv2d(3, 4, 1), reader

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.conv(x)
        rounded = rounded_to(0.1, first.relu_() if self.reader == "in place" else first.relu())
        return rounded_to(0.2, (rounded + (1 if self.reader == "alone" else first)).clamp(-1, 1))


@pytest.mark.parametrize(
    ("reader", "count"), [("alone", 3), ("with an addition", 3), ("in place", 2)]
)
def test_a_tensor_that_nothing_else_reads_is_written_to(reader: str, count: int) -> None:
    x = torch.linspace(-3, 3, 96).reshape(2, 3, 4, 4)
    graph: Any = torch.export.export(Activated(reader).eval(), (x,)).module()
    with torch.inference_mode():
        expected, given = graph(x), x.clone()
        constant_folding.fuse_rounding_(graph)
        assert torch.equal(graph(x), expected)
        assert torch.equal(graph(x), expected)
    assert torch.equal(x, given)
    called = Counter(node.target for node in graph.graph.nodes)
    assert called[constant_folding.round_to_step_] + called[aten.clamp_.default] == count
    assert called[aten.relu_.default] == (reader != "with an addition")


class Kept(nn.Module):
    """Rounds the model's input, a view of what it also returns, or bfloat16."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.conv = nn.Conv2d(3, 4, 1, dtype=torch.bfloat16 if what == "bfloat16" else None)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.what == "input":
            return (rounded_to(0.1, x),)
        y = self.conv(x)
        return (rounded_to(0.1, y.flatten(1)), y) if self.what == "view" else (rounded_to(0.1, y),)


@pytest.mark.parametrize("what", ["input", "view", "bfloat16"])
def test_what_else_is_read_or_of_another_type_is_not_written_to(what: str) -> None:
    given = torch.linspace(-3, 3, 96).reshape(2, 3, 4, 4)
    given = given.bfloat16() if what == "bfloat16" else given
    graph: Any = torch.export.export(Kept(what).eval(), (given,)).module()
    with torch.inference_mode():
        x = given.clone()
        expected = [y.clone() for y in graph(x)]
        constant_folding.fuse_rounding_(graph)
        assert all(map(torch.equal, graph(x), expected))
    assert torch.equal(x, given)


@pytest.mark.parametrize("zero_point", [-128, 0, 3])
def test_every_number_is_rounded_as_torch_does(zero_point: int) -> None:
    signs = torch.tensor([-1.0, 1.0])
    x = torch.cat([torch.linspace(-20, 20, 999), *(signs * v for v in (0, 0.03, 1e30, math.inf))])
    x = torch.cat([x, torch.tensor([math.nan])])
    limits = (0.1, zero_point, -128, 127)
    integers = torch.ops.quantized_decomposed.quantize_per_tensor(x, *limits, torch.int8)
    dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor
    expected = dequantize(integers, *limits, torch.int8)
    found = constant_folding.round_to_step(x, *limits)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


@pytest.mark.parametrize(("max_bytes", "folded"), [(2**30, True), (0, False)])
def test_folding_stops_at_a_limit_of_memory(
    max_bytes: int, folded: bool, quantized: GraphModel
) -> None:
    graph: Any = quantized.load()
    (x,) = quantized.signature.example(batch=3)
    expected = graph(x)
    constant_folding.fold_constants_(graph, max_bytes=max_bytes)
    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
    assert bool(graph.graph.find_nodes(op="call_function", target=dequantize)) != folded
    assert torch.equal(graph(x), expected)


class InSteps(nn.Module):
    """Computes what it multiplies by from its weights, in several steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.first * 2 + 1) * 3).t() @ ((self.second * 2 + 1) * 3).t()


def test_steps_on_the_way_take_no_memory_that_others_need() -> None:
    x = torch.ones(2, 8)
    graph: Any = torch.export.export(InSteps(), (x,)).module()
    constant_folding.fold_constants_(graph, max_bytes=3 * 8 * 8 * 4)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.aten.matmul.default] * 2
    assert torch.equal(graph(x), InSteps()(x))


def test_random_values_are_drawn_at_each_run() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(self.scale) + self.scale * 2

    graph: Any = torch.export.export(Noisy(), (torch.zeros(1000),)).module()
    constant_folding.fold_constants_(graph)
    assert not torch.equal(graph(torch.zeros(1000)), graph(torch.zeros(1000)))


class WritesInPlace(nn.Module):
    """Writes to a copy of its weights, and to a part of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table, other = self.weight.clone(), self.weight * 2
        before = x + table
        table.copy_(x[0])
        other[1:3].add_(x[0, :2])
        return before + table + other


def test_what_a_call_writes_to_in_place_is_made_anew_by_each_call() -> None:
    module, x = WritesInPlace(), torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    graph: Any = torch.export.export(module, (x,)).module()
    constant_folding.fold_constants_(graph)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(graph(x), module(x))
