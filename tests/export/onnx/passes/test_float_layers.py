"""A layer that stays float in a quantized graph stays float in onnxruntime too."""

from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import Parity
from compress.data.splits import Splits
from compress.quantization.config.backend_targets import Target
from compress.quantization.stages.static import QuantizeStatic
from export.onnx.stage import ExportOnnx

NETWORKS = Path(__file__).parents[3] / "compress" / "quantization"
IMAGE = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))


def quantized(folder: Path, factory: str, left: str, target: Target) -> tuple[GraphModel, Context]:
    """Return a quantized graph with some layers in float, and the context it was made in."""
    torch.manual_seed(0)
    recipe = Recipe(factory=factory)
    state = recipe.build(NETWORKS).state_dict()
    model = EagerModel.create(folder / "source", recipe, state, IMAGE, folder=NETWORKS)
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = Splits({"train": [(image, torch.tensor(0)) for image in images]})
    context = Context(root=folder / "int8", data=data)
    stage = QuantizeStatic(calibration_samples=32, exclude=(left,), target=target)
    return stage(model, context), context


@pytest.mark.parametrize(
    ("factory", "left", "kernels"),
    [("networks:mobilenet", "depthwise*", {"Conv": 1}), ("networks:mlp", "3", {"Gemm": 1})],
)
def test_a_layer_between_integers_keeps_its_float_weights(
    tmp_path: Path, factory: str, left: str, kernels: dict[str, int]
) -> None:
    graph, context = quantized(tmp_path, factory, left, "onnxruntime-cpu")
    exported = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert exported.manifest.facts["float_kernels"] == kernels
    assert Parity(atol=0).measure(graph, exported, context) < 1e-5


def test_graphs_for_gpus_are_left_as_they_are(tmp_path: Path) -> None:
    graph, context = quantized(tmp_path, "networks:residual", "first", "tensorrt")
    exported = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert "Max" not in exported.manifest.facts["operators"]
    assert Parity(atol=0).measure(graph, exported, context) < 1e-5
