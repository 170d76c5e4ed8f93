from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.gates import Parity
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import build_model, images


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[EagerModel, Context]:
    folder = tmp_path_factory.mktemp("bits")
    rows = TensorDataset(images(), torch.zeros(64, dtype=torch.int64))
    model = build_model(folder / "source", "networks:mlp")
    return model, Context(root=folder / "next", data=Splits({"train": rows, "val": rows}, 32))


def quantized(source: tuple[EagerModel, Context], path: Path, **bits: int) -> GraphModel:
    model, context = source
    stage = QuantizeStatic.model_validate({"calibration_samples": 64, **bits})
    return stage(model, context.with_root(path))


def error(source: tuple[EagerModel, Context], other: GraphModel) -> float:
    return Parity(atol=0).measure(source[0], other, source[1])


@pytest.mark.slow
def test_four_bit_weights_take_fifteen_values(
    source: tuple[EagerModel, Context], tmp_path: Path
) -> None:
    graph = quantized(source, tmp_path / "w4", weight_bits=4)
    state = graph.program().state_dict | graph.program().constants
    weights = [x for x in state.values() if x.dtype is torch.int8]
    assert len(weights) == 3
    for weight in weights:
        assert weight.min() >= -7
        assert weight.abs().amax() == 7
    assert error(source, graph) > 3 * error(source, quantized(source, tmp_path / "w8"))


def test_sixteen_bit_activations_lose_less(
    source: tuple[EagerModel, Context], tmp_path: Path
) -> None:
    wide = quantized(source, tmp_path / "a16", activation_bits=16)
    types = {n.args[5] for n in wide.program().graph.nodes if "per_tensor" in str(n.target)}
    assert types == {torch.uint16}
    assert QuantizeStatic(activation_bits=16).activation_formats == {"uint16"}
    assert error(source, wide) < 0.8 * error(source, quantized(source, tmp_path / "a8"))


@pytest.mark.slow
def test_onnxruntime_answers_alike_with_sixteen_bits(
    source: tuple[EagerModel, Context], tmp_path: Path
) -> None:
    graph = quantized(source, tmp_path / "a16", weight_bits=4, activation_bits=16)
    onnx = ExportOnnx()(graph, source[1].with_root(tmp_path / "onnx"))
    assert onnx.manifest.facts["opset"] == 21
    assert onnx.manifest.facts["integer_kernels"] == {}
    assert Parity(atol=0).measure(graph, onnx, source[1]) < 1e-4
    with pytest.raises(StageFailed, match="opset 20 has no 16-bit activations; set opset: 21"):
        ExportOnnx(opset=20)(graph, source[1].with_root(tmp_path / "none"))
