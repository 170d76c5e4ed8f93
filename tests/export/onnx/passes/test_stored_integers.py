"""Weights stored in 4 bits, and biases without scales of their own, are computed as integers."""

from pathlib import Path

import onnx_ir as ir
import pytest

from compress.artifacts.graph_model import GraphModel
from compress.core.context import Context
from compress.core.gates import Parity
from compress.export.onnx.graph import stored
from compress.export.onnx.proto_io import read
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.quantization.config.dtype_scheme import Target
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import images, network, samples

KERNELS = {"QLinearConv", "QGemm"}


def quantized(folder: Path, target: Target = "onnxruntime-cpu") -> tuple[GraphModel, Context]:
    """Return a graph with weights of 4 bits, and the context it was made in."""
    context = Context(root=folder / "w4", data=samples(images(32)))
    stage = QuantizeStatic(calibration_samples=32, weight_bits=4, target=target)
    return stage(network(folder / "source", "networks:mobilenet"), context), context


def weights(exported: OnnxModel) -> list[ir.TensorProtocol]:
    """Return the integer weights that are large enough to be packed."""
    tensors = read(exported.payload_path).graph.initializers.tensors()
    integers = (ir.DataType.INT8, ir.DataType.INT4)
    return [t for t in tensors if t.dtype in integers and t.size >= 64 and len(t.shape) > 1]


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
    assert {t.dtype for t in weights(packed)} == {ir.DataType.INT4}
    assert {t.dtype for t in weights(whole)} == {ir.DataType.INT8}
    saved = sum(t.nbytes for t in weights(whole)) // 2
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
    convolutions = [node for node in model if node.op_type == "Conv"]
    assert convolutions
    biases = [stored(node.inputs[2]) for node in convolutions]
    assert {None if bias is None else bias.dtype for bias in biases} == {ir.DataType.FLOAT}
    assert all(value.uses() for value in model.initializers.values())


@pytest.mark.slow
def test_graphs_for_gpus_keep_8_bits(tmp_path: Path) -> None:
    source, context = quantized(tmp_path, "tensorrt")
    exported = ExportOnnx()(source, context.with_root(tmp_path / "onnx"))
    assert {t.dtype for t in weights(exported)} == {ir.DataType.INT8}
