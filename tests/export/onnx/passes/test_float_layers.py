"""A layer that stays float in a quantized graph stays float in onnxruntime too."""

from pathlib import Path

import pytest

from compress.artifacts.graph_model import GraphModel
from compress.core.context import Context
from compress.core.gates import Parity
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.config.dtype_scheme import Target
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import IMAGE, images, network, network_of, samples


def quantized(folder: Path, factory: str, left: str, target: Target) -> tuple[GraphModel, Context]:
    """Return a quantized graph with some layers in float, and the context it was made in."""
    model = network(folder / "source", factory)
    context = Context(root=folder / "int8", data=samples(images(32)))
    stage = QuantizeStatic(calibration_samples=32, exclude=(left,), target=target)
    return stage(model, context), context


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "left", "kernels"),
    [
        ("networks:mobilenet", "depthwise*", {"Conv": 1}),
        pytest.param("networks:mlp", "3", {"Gemm": 1}, marks=pytest.mark.soak),
    ],
)
def test_a_layer_between_integers_keeps_its_float_weights(
    tmp_path: Path, factory: str, left: str, kernels: dict[str, int]
) -> None:
    graph, context = quantized(tmp_path, factory, left, "onnxruntime-cpu")
    exported = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert exported.manifest.facts["float_kernels"] == kernels
    assert Parity(atol=0).measure(graph, exported, context) < 1e-5


@pytest.mark.slow
def test_a_layer_whose_pooled_and_flattened_output_is_quantized_keeps_its_float_weights(
    tmp_path: Path,
) -> None:
    parts = "Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()"
    source = f"from torch import nn\n\ndef flat():\n    return nn.Sequential(nn.{parts}"
    model = network_of(tmp_path, f"{source}, nn.Linear(8, 4))\n", "flat:flat", IMAGE)
    context = Context(root=tmp_path / "int8", data=samples(images(32)))
    graph = QuantizeStatic(calibration_samples=32, exclude=("2",))(model, context)
    exported = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert exported.manifest.facts["float_kernels"] == {"Conv": 1}
    assert Parity(atol=0).measure(graph, exported, context) < 1e-5


@pytest.mark.slow
def test_graphs_for_gpus_are_left_as_they_are(tmp_path: Path) -> None:
    graph, context = quantized(tmp_path, "networks:residual", "first", "tensorrt")
    exported = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert "Max" not in exported.manifest.facts["operators"]
    assert Parity(atol=0).measure(graph, exported, context) < 1e-5
