"""What is rewritten before it is compiled computes what it did."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import choose_qparams_tensor as inductors

import compress
from compress.artifacts.graph_model import GraphModel
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import Parity
from compress.core.stage import Stage
from compress.export.aotinductor.package import (
    CHOOSE,
    LINEAR,
    check_indices_,
    decomposed,
    merge_products_,
    widen_ranges_,
)
from compress.export.aotinductor.stage import ExportAot
from compress.quantization.pt2e.graph_capture import functionalize
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import EXACT_BITS, network, samples

TOKENS = Signature(
    inputs=(TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="classes"), OutputSpec(name="states")),
)
STAGES: dict[str, Stage] = {
    "static": QuantizeStatic(target="inductor-cpu", calibration_samples=32, weight_bits=EXACT_BITS),
    "dynamic": QuantizeDynamic(target="inductor-cpu"),
}


def quantized(root: Path, kind: str, layers: int = 2) -> tuple[GraphModel, Context]:
    model = network(root / "source", "sequences:encoder", TOKENS, layers=layers)
    rows = torch.randint(0, 50, (32, 12), generator=torch.Generator().manual_seed(1))
    context = Context(root=root / "int8", data=samples(rows))
    return STAGES[kind](model, context), context.with_root(root / "aot")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.soak)])
def test_products_of_the_same_integers_become_one(tmp_path: Path, kind: str) -> None:
    model, _ = quantized(tmp_path, kind)
    program = model.program()
    merge_products_(program)
    products = [n.meta.get("val") for n in program.graph.nodes if n.target is LINEAR]
    # In each of two layers queries, keys and values, which attention reads; not what a gelu or an
    # addition follows.
    assert [value.shape[-1] for value in products] == [96, 32, 64, 32] * 2 + [8]
    for sizes in (1, 1), (3, 11):
        tokens = torch.arange(sizes[0] * sizes[1]).view(sizes)
        expected, got = model.program().module()(tokens), program.module()(tokens)
        for before, after in zip(expected, got, strict=True):
            torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


class Moved(torch.nn.Module):
    """Two products of the same integers, each viewed again after it was moved."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = torch.randint(-127, 128, (2, 4, 8), dtype=torch.int8, generator=generator)
        for i, weight in enumerate(weights):
            self.register_buffer(f"weight_{i}", weight)
        self.register_buffer("scales", torch.full((4,), 0.01))
        self.register_buffer("zeros", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = decomposed.quantize_per_tensor(x, 0.1, 3, 0, 255, torch.uint8)
        first, second = (self.product(rounded, w) for w in (self.weight_0, self.weight_1))
        return first.view(2, 3, 2, 2).view(2, 6, 2), second.unsqueeze(1)[:, :, :2].view(2, 4, 2)

    def product(self, rounded: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = decomposed.dequantize_per_tensor(rounded, 0.1, 3, 0, 255, torch.uint8)
        by_channel = (self.scales, self.zeros, 0, -127, 127, torch.int8)
        weight = decomposed.dequantize_per_channel(weight, *by_channel)
        return torch.nn.functional.linear(x, weight)


def test_what_is_viewed_again_after_it_was_moved_may_lie_with_gaps() -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    program = functionalize(torch.export.export(Moved(), (x,)))
    expected = program.module()(x)
    merge_products_(program)
    assert [n.target for n in program.graph.nodes].count(LINEAR) == 1
    for before, after in zip(expected, program.module()(x), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


@pytest.mark.soak
@pytest.mark.slow
def test_a_product_of_queries_keys_and_values_is_one_kernel(tmp_path: Path) -> None:
    model, context = quantized(tmp_path, "static", layers=1)
    artifact = ExportAot()(model, context)
    kernels = artifact.manifest.facts["integer_kernels"]
    assert kernels == {"qlinear_pointwise_binary_tensor": 2, "qlinear_pointwise_tensor": 3}
    assert Parity(atol=0).measure(model, artifact, context) < 1e-4


class SequenceFirst(torch.nn.Module):
    """Transposes what it reads, as torch's own attention does with batch_first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.slow
def test_transposed_rows_of_any_number_are_multiplied_as_integers(tmp_path: Path) -> None:
    x = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(1))
    settings = {"activation_range": "row", "target": "inductor-cpu"}
    small = compress.quantize_dynamic(SequenceFirst(), example_inputs=x, **settings)
    artifact = compress.export_aot(small, out=tmp_path / "aot")
    assert sum(artifact.manifest.facts["integer_kernels"].values()) == 1
    assert artifact.manifest.facts["float_kernels"] == {}
    rows = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(2))
    with artifact.open() as predict, small.open() as expected:
        found = predict(rows)[0]
        beside = predict(torch.cat([rows[:3], 1000 * rows[3:]]))[0]
        assert torch.allclose(found, expected(rows)[0], rtol=0, atol=1e-5)
    assert torch.equal(found[:3], beside[:3])


class Rounded(torch.nn.Module):
    """Values as 8 bits hold them, in a range that each call chooses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, zero = decomposed.choose_qparams(x, 0, 255, 1e-9, torch.uint8)
        rounded = decomposed.quantize_per_tensor(x, scale, zero, 0, 255, torch.uint8)
        return decomposed.dequantize_per_tensor(rounded, scale, zero, 0, 255, torch.uint8)


class ByInductor(torch.fx.Interpreter):
    """Runs a program as Inductor takes the choice of a range apart."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().call_function(inductors if target is CHOOSE else target, args, kwargs)


@pytest.mark.parametrize("values", [(5.0, 6.0), (-6.0, -5.0), (-1.0, 2.0)])
def test_a_range_holds_zero_where_all_values_have_one_sign(values: tuple[float, float]) -> None:
    x = torch.linspace(*values, 12)
    program = torch.export.export(Rounded(), (x,))
    widen_ranges_(program)
    torch.testing.assert_close(program.module()(x), Rounded()(x))
    torch.testing.assert_close(ByInductor(program.module()).run(x), Rounded()(x))


class Lookups(torch.nn.Module):
    """Reads by integers of its inputs, by others, and by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 4)
        self.table = torch.nn.Parameter(torch.randn(9, 4))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        read = self.embedding(2 * ids + 1) + self.table[ids] + x[:, torch.arange(2)].sum()
        return read.sum(1) + torch.gather(x, 1, ids[:, :1]) + x.index_select(0, ids[:, 1])


def test_integers_that_look_up_nothing_are_refused_where_no_thread_of_code_raises() -> None:
    module, generator = Lookups().eval(), torch.Generator().manual_seed(0)
    ids = torch.randint(2, (3, 5), generator=generator)
    x, batch = torch.randn(3, 4, generator=generator), torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(module, (ids, x), dynamic_shapes=({0: batch}, {0: batch}))
    check_indices_(program)
    program.graph_module.graph.lint()
    run = program.module()
    assert torch.equal(run(ids, x), module(ids, x))
    tables = {(0, 4): "embedding", (0, -1): "embedding", (1, 3): "x"}
    for (column, wrong), table in tables.items():
        changed = ids.clone()
        changed[0, column] = wrong
        with pytest.raises(RuntimeError, match=rf"row of \w*{table}\w* is out of range"):
            run(changed, x)
