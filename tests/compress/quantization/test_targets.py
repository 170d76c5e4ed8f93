"""Each target's own formats and patterns."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch.fx import Node

from compress.artifacts.graph_model import GraphModel
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.config.dtype_scheme import Target, scheme_for
from compress.quantization.pt2e.graph_capture import capture
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import build_model

CONVOLUTION, ADDITION = "aten.conv2d.default", "aten.add.Tensor"
BACK = "quantized_decomposed.dequantize_per_tensor.default"
THERE = "quantized_decomposed.quantize_per_tensor.default"


def quantized(
    tmp_path: Path, target: str, shape: tuple[int | str, ...] = ("batch", 1, 8, 8)
) -> tuple[GraphModel, Context]:
    signature = Signature(inputs=(TensorSpec(name="image", shape=shape),))
    model = build_model(tmp_path / "source", "networks:residual", signature)
    samples = [(torch.randn(1, 8, 8), torch.tensor(0)) for _ in range(32)]
    context = Context(root=tmp_path / target, data=Splits({"train": samples, "val": samples}))
    stage = QuantizeStatic.model_validate({"target": target, "calibration_samples": 32})
    return stage(model, context), context


def nodes(model: GraphModel, target: str) -> list[Node]:
    return [n for n in model.program().graph.nodes if str(n.target) == target]


def reads_integers(node: Node, place: int = 0) -> bool:
    return str(node.args[place].target) == BACK  # type: ignore[union-attr]


def test_onnxruntime_on_cpus_takes_unsigned_integers_everywhere(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path, "onnxruntime-cpu")
    assert model.manifest.facts["target"] == "onnxruntime-cpu"
    assert all(reads_integers(n) for n in nodes(model, CONVOLUTION))
    (addition,) = nodes(model, ADDITION)
    assert reads_integers(addition, 0) and reads_integers(addition, 1)
    assert {n.args[5] for n in nodes(model, THERE)} == {torch.uint8}


def test_inductor_keeps_one_channel_in_float_where_an_axis_is_dynamic(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path, "inductor-cpu")
    stem, *others = nodes(model, CONVOLUTION)
    assert not reads_integers(stem) and all(reads_integers(n) for n in others)
    assert model.manifest.facts["float_modules"] == ["stem"]
    biases = [n.args[2] for n in others]
    assert all(n.op == "placeholder" for n in biases), "oneDNN's kernels take float biases"


def test_inductor_adds_the_residual_within_the_convolution(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path, "inductor-cpu")
    (addition,) = nodes(model, ADDITION)
    assert [reads_integers(addition, place) for place in (0, 1)] == [False, True]
    assert str(addition.args[0].target) == CONVOLUTION  # type: ignore[union-attr]
    assert model.manifest.facts["quantized_operators"] == {"add": 1, "conv2d": 2, "linear": 1}


def test_inductor_takes_one_channel_where_all_is_fixed(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path, "inductor-cpu", (4, 1, 8, 8))
    assert all(reads_integers(n) for n in nodes(model, CONVOLUTION))


@pytest.mark.slow
def test_tensorrt_has_signed_integers_before_layers_and_on_the_residual(tmp_path: Path) -> None:
    model, context = quantized(tmp_path, "tensorrt")
    rounding = nodes(model, THERE)
    assert {(n.args[2], n.args[3], n.args[5]) for n in rounding} == {(0, -128, torch.int8)}
    assert QuantizeStatic(target="tensorrt").activation_formats == {"int8"}
    assert all(reads_integers(n) for n in nodes(model, CONVOLUTION))
    (addition,) = nodes(model, ADDITION)
    assert [reads_integers(addition, place) for place in (0, 1)] == [False, True]
    assert str(addition.args[0].target) == CONVOLUTION  # type: ignore[union-attr]
    layers = nodes(model, CONVOLUTION) + nodes(model, "aten.linear.default")
    assert all(n.args[2].op == "placeholder" for n in layers)  # type: ignore[union-attr]
    onnx = ExportOnnx()(model, context.with_root(tmp_path / "onnx"))
    assert onnx.manifest.lineage[-2].settings["target"] == "tensorrt"


@pytest.mark.slow
def test_xnnpack_has_signed_integers_with_zero_points_on_both_sides_of_a_layer(
    tmp_path: Path,
) -> None:
    model, _ = quantized(tmp_path, "xnnpack")
    rounding = nodes(model, THERE)
    assert {(n.args[3], n.args[4], n.args[5]) for n in rounding} == {(-128, 127, torch.int8)}
    assert any(n.args[2] != 0 for n in rounding)
    layers = nodes(model, CONVOLUTION) + nodes(model, "aten.linear.default")
    assert all(reads_integers(n) for n in layers)
    assert str(nodes(model, "aten.linear.default")[0].next.target) == THERE  # the output, too
    assert all(n.args[2].op == "placeholder" for n in layers)  # type: ignore[union-attr]


def test_onnxruntime_on_cuda_rounds_before_layers_alone(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path, "onnxruntime-cuda")
    (addition,) = nodes(model, ADDITION)
    assert not reads_integers(addition, 0) and not reads_integers(addition, 1)
    assert all(reads_integers(n) for n in nodes(model, CONVOLUTION))


@pytest.mark.slow
def test_exporting_a_graph_for_another_runtime_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, context = quantized(tmp_path, "inductor-cpu")
    ExportOnnx()(model, context.with_root(tmp_path / "onnx"))
    assert "was quantized for inductor-cpu" in caplog.text
    assert "`target: onnxruntime-cpu`" in caplog.text


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime-cuda"])
def test_dynamic_quantization_is_refused_for_targets_without_kernels(target: str) -> None:
    with pytest.raises(ValidationError, match="no kernels for ranges found at run time; use"):
        QuantizeDynamic.model_validate({"target": target})


def test_macs_of_a_graph_with_fused_attention_are_its_modules(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 5, 4)),))
    model = build_model(tmp_path / "source", "networks:attention", signature)
    graph = QuantizeDynamic()(model, Context(root=tmp_path / "graph"))
    assert graph.macs() == model.macs() == 5 * (4 * 16 + 2 * 5 * 16 + 16 * 3)


class Lone(torch.nn.Module):
    """A depthwise convolution between two operators that compute floats, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 16, 1)
        self.lone = torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.second = torch.nn.Conv2d(16, 16, 1)
        self.among = torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.last = torch.nn.Conv2d(16, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.hardswish(self.first(image))
        x = torch.nn.functional.hardswish(self.lone(x))
        return self.last(self.among(self.second(x)))


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "inductor-cpu"])
def test_a_depthwise_layer_between_floats_stays_float_in_onnxruntime(target: Target) -> None:
    signature = Signature(inputs=(TensorSpec(name="image", shape=(2, 3, 8, 8)),))
    graph = capture(Lone().eval(), signature)
    quantizer = OnnxRuntimeQuantizer(scheme_for(target), "minmax")
    quantizer.annotate(quantizer.transform_for_annotation(graph))
    expected = ["lone"] if target == "onnxruntime-cpu" else []
    assert quantizer.float_modules == expected
    assert quantizer.quantized["conv2d"] == 5 - len(expected)
