"""A layer that stays float in a quantized graph stays float in onnxruntime too."""

from pathlib import Path

import pytest
import torch

from compress.core.data import Splits
from compress.core.eager import EagerModel
from compress.core.gates import Parity
from compress.core.recipe import Recipe
from compress.core.signature import Signature, TensorSpec
from compress.core.stage import Context
from compress.quantization.static_stage import QuantizeStatic
from export.onnx import ExportOnnx

NETWORKS = Path(__file__).parents[1] / "compress" / "quantization"
IMAGE = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))


@pytest.mark.parametrize(
    ("factory", "left", "kernels"),
    [("networks:mobilenet", "depthwise*", {"Conv": 1}), ("networks:mlp", "3", {"Gemm": 1})],
)
def test_a_layer_between_integers_keeps_its_float_weights(
    tmp_path: Path, factory: str, left: str, kernels: dict[str, int]
) -> None:
    torch.manual_seed(0)
    recipe = Recipe(factory=factory)
    state = recipe.build(NETWORKS).state_dict()
    model = EagerModel.create(tmp_path / "source", recipe, state, IMAGE, folder=NETWORKS)
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = Splits({"train": [(image, torch.tensor(0)) for image in images]})
    context = Context(root=tmp_path / "int8", data=data)
    graph = QuantizeStatic(calibration_samples=32, exclude=(left,))(model, context)
    exported = ExportOnnx()(graph, context.at(tmp_path / "onnx"))
    assert exported.manifest.facts["float_kernels"] == kernels
    assert Parity(atol=0).value(graph, exported, context) < 1e-5
