"""A quantized file with layers put back to float is the one that the stage makes without them."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.export.latency.kernels import kernels_of
from compress.export.latency.resizing import (
    MixedModel,
    ResizableModel,
    is_float,
    leave_float,
    weighted_layers,
)
from compress.export.onnx.graph import count_operators, strip_
from compress.export.onnx.lowering import translate
from compress.export.onnx.passes.stored_integers import compact_
from compress.export.onnx.proto_io import write
from compress.quantization.mixed_precision import bit_search as layer_names
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from tests.export.builders import samples

NETS = """
import torch
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.c, self.pool = nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(2)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.bn(self.stem(x)).relu()
        x = (self.a(x) + self.b(x)).relu()
        x = x + self.c(x).relu()
        return self.head(self.pool(x).mean((2, 3)))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 4)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        a = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x)
        x = self.norm(x + self.o(a))
        return self.head((x + self.down(nn.functional.gelu(self.up(x)))).mean(1))
"""


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[EagerModel, Context]]:
    folder = tmp_path_factory.mktemp("nets")
    (folder / "nets_with_layers.py").write_text(NETS)
    made = {}
    for name, sizes in (("Branches", (2, 8, 8)), ("Block", (6, 32))):
        torch.manual_seed(0)
        recipe = Recipe(factory=f"nets_with_layers:{name}")
        signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", *sizes)),))
        state = recipe.build(folder).state_dict()
        model = EagerModel.create(folder / name, recipe, state, signature, folder=folder)
        x = torch.randn(64, *sizes, generator=torch.Generator().manual_seed(0))
        made[name] = model, Context(root=folder / f"{name}-x", data=samples(x))
    return made


def exported(net: tuple[EagerModel, Context], stage, name: str) -> ir.Model:
    model, context = net
    root = context.root.with_name(f"{context.root.name}-{stage.stage}-{name}")
    graph, _ = translate(stage(model, context.with_root(root)), None, "auto")
    compact_(graph)
    strip_(graph)
    return graph


def kernels(model: ir.Model, net: tuple[EagerModel, Context], tmp_path: Path) -> Counter:
    write(model, tmp_path / "model.onnx")
    (x,) = net[0].signature.example()
    found = kernels_of(tmp_path / "model.onnx", {"x": x.numpy()}, 1)
    return Counter((kernel.operator, kernel.sizes) for kernel in found)


STATIC = QuantizeStatic(calibration_samples=32)


@pytest.fixture(scope="module")
def whole(nets) -> Callable[[str, Any], ir.Model]:
    """Return what exports a network quantized by a stage, once."""
    return cache(lambda net, stage: exported(nets[net], stage, "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "stage", "layers"),
    [
        pytest.param("Branches", STATIC, ("b",), marks=pytest.mark.soak),
        ("Branches", STATIC, ("stem", "a", "c")),
        pytest.param("Block", STATIC, ("q", "up", "head"), marks=pytest.mark.soak),
        pytest.param("Block", QuantizeDynamic(), ("q", "down"), marks=pytest.mark.soak),
        ("Block", QuantizeWeights(bits=4), ("v", "up")),
    ],
)
def test_operators_and_kernels_are_those_of_the_stage_that_excludes_the_layers(
    net, stage, layers, nets, whole, tmp_path: Path
) -> None:
    quantized, model = whole(net, stage), nets[net][0]
    names = [one.name for one in layer_names.weighted_layers(model.load(), model.signature)]
    assert len(weighted_layers(quantized)) == len(names)
    edited = leave_float(quantized, [names.index(layer) for layer in layers])
    excluding = stage.model_copy(update={"exclude": layers})
    expected = exported(nets[net], excluding, "-".join(layers))
    assert kernels(edited, nets[net], tmp_path) == kernels(expected, nets[net], tmp_path)
    if stage is STATIC:  # others write a Gemm where this has MatMul and Add
        assert count_operators(edited) == count_operators(expected)


@pytest.mark.slow
def test_with_its_float_weights_a_file_computes_what_the_float_model_does(nets, whole) -> None:
    model, quantized = nets["Branches"][0], whole("Branches", STATIC)
    layers = layer_names.weighted_layers(model.load(), model.signature)
    assert [layer.name for layer in layers] == ["stem", "a", "b", "c", "head"]
    weights = {number: layer.weight.numpy() for number, layer in enumerate(layers)}
    edited = leave_float(quantized, range(5), weights)
    assert all(is_float(node) for node in weighted_layers(edited))
    assert "QuantizeLinear" not in count_operators(edited)
    (x,) = model.signature.example()
    session = onnxruntime.InferenceSession(ir.to_proto(edited).SerializeToString())
    (found,) = session.run(None, {"x": x.numpy()})
    # Biases were rounded to integers, which are far finer than weights.
    np.testing.assert_allclose(found, model.load()(x).detach(), atol=2e-3)
    with pytest.raises(StageFailed, match=r"a float weight has sizes \[4, 4\], expected \[16, 2"):
        leave_float(quantized, [0], {0: np.ones((4, 4), "f")})


def test_neighbours_and_terms_of_an_addition_meet(whole) -> None:
    resizable = ResizableModel.of_one_size(whole("Branches", STATIC))
    mixed = MixedModel(resizable, {name: (i,) for i, name in enumerate("sabch")})
    met = {pair for pair in ("sa", "sb", "ab", "ac", "bc", "sh", "ah") if mixed.meet(*pair)}
    assert met == {"sa", "sb", "ab", "ac", "bc"}
    assert is_float(weighted_layers(mixed.resize({"a": "float"}))[1])
