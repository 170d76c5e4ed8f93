"""Weights stored in 4 bits, and biases without scales of their own, are computed as integers."""

from pathlib import Path

import onnx
import pytest

from compress.artifacts.graph_model import GraphModel
from compress.core.context import Context
from compress.core.gates import Parity
from compress.quantization.config.dtype_scheme import Target
from compress.quantization.stages.static import QuantizeStatic
from export.onnx.proto_io import read
from export.onnx.stage import ExportOnnx, OnnxModel
from tests.export.builders import images, network, samples

KERNELS = {"QLinearConv", "QGemm"}


def quantized(folder: Path, target: Target = "onnxruntime-cpu") -> tuple[GraphModel, Context]:
    """Return a graph with weights of 4 bits, and the context it was made in."""
    context = Context(root=folder / "w4", data=samples(images(32)))
    stage = QuantizeStatic(calibration_samples=32, weight_bits=4, target=target)
    return stage(network(folder / "source", "networks:mobilenet"), context), context


def weights(exported: OnnxModel) -> list[onnx.TensorProto]:
    """Return the integer weights that are large enough to be packed."""
    tensors = read(exported.payload_path).graph.initializer
    integers = (onnx.TensorProto.INT8, onnx.TensorProto.INT4)
    sizes = {t.name: onnx.numpy_helper.to_array(t).size for t in tensors}
    return [t for t in tensors if t.data_type in integers and sizes[t.name] >= 64 and t.dims[1:]]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphModel, Context]:
    return quantized(tmp_path_factory.mktemp("w4"))


@pytest.mark.slow
@pytest.mark.parametrize("optimize", [pytest.param("none", marks=pytest.mark.soak), "extended"])
def test_weights_in_4_bits_give_the_answers_of_8(
    graph: tuple[GraphModel, Context], tmp_path: Path, optimize: str
) -> None:
    source, context = graph
    stage = ExportOnnx.model_validate({"optimize": optimize})
    packed = stage(source, context.with_root(tmp_path / "packed"))
    whole = ExportOnnx(opset=20)(source, context.with_root(tmp_path / "whole"))
    assert {t.data_type for t in weights(packed)} == {onnx.TensorProto.INT4}
    assert {t.data_type for t in weights(whole)} == {onnx.TensorProto.INT8}
    saved = sum(len(t.raw_data) for t in weights(whole)) // 2
    assert whole.payload_bytes - packed.payload_bytes > 0.6 * saved
    assert Parity(atol=0).measure(whole, packed, context) == 0
    for key in ("integer_kernels", "float_kernels"):
        assert packed.manifest.facts[key] == whole.manifest.facts[key]
    assert packed.manifest.facts["integer_kernels"].keys() >= KERNELS
    assert packed.manifest.facts["float_kernels"] == {}
    assert packed.parameters() == whole.parameters() == source.parameters()
    assert packed.macs() == whole.macs()


@pytest.mark.slow
def test_biases_of_convolutions_are_stored_as_floats(
    graph: tuple[GraphModel, Context], tmp_path: Path
) -> None:
    source, context = graph
    exported = ExportOnnx()(source, context.with_root(tmp_path / "onnx"))
    model = read(exported.payload_path).graph
    floats = {t.name for t in model.initializer if t.data_type == onnx.TensorProto.FLOAT}
    convolutions = [node for node in model.node if node.op_type == "Conv"]
    assert convolutions
    assert all(node.input[2] in floats for node in convolutions)
    read_names = {name for node in model.node for name in node.input}
    assert read_names >= {tensor.name for tensor in model.initializer}


@pytest.mark.slow
def test_graphs_for_gpus_keep_8_bits(tmp_path: Path) -> None:
    source, context = quantized(tmp_path, "tensorrt")
    exported = ExportOnnx()(source, context.with_root(tmp_path / "onnx"))
    assert {t.data_type for t in weights(exported)} == {onnx.TensorProto.INT8}
