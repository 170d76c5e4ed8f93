"""Kernels that return other strides than those that a graph was traced with."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.stage import Stage
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.pt2e.graph_capture import capture
from compress.quantization.stages.half_precision import ConvertPrecision
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import answer, relative_error
from tests.export.zoo.export_cell import import_case
from tests.export.zoo.hard import HARD

BIASED = next(case for case in HARD if case.name == "biased")


@pytest.mark.parametrize(
    "stage",
    [
        QuantizeStatic(calibration_samples=16),
        ConvertPrecision(dtype="float16", calibration_samples=16),
    ],
)
def test_attention_with_a_parameter_as_its_mask_is_quantized(stage: Stage, tmp_path: Path) -> None:
    model = import_case(BIASED, tmp_path / "model")
    rows = [(tuple(x[0] for x in model.signature.example(1, seed=s)), 0) for s in range(16)]
    data = Splits({"train": rows, "val": rows}, batch_size=8)
    quantized = stage(model, Context(root=tmp_path / "quantized", data=data))
    exported = ExportOnnx()(quantized, Context(root=tmp_path / "onnx"))
    (x,) = model.signature.example(5, seed=3)
    expected = answer(model, x)
    assert relative_error(expected, answer(quantized, x)) < 0.05
    assert relative_error(expected, answer(exported, x)) < 0.05


class ChannelsLast(nn.Module):
    """A convolution whose weight has channels last, and so its output, which is viewed as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(image)).permute(0, 2, 3, 1).view(image.shape[0], -1)


def test_a_graph_takes_weights_of_another_layout() -> None:
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 3, 8, 8)),))
    module = ChannelsLast().eval()
    graph = capture(module, signature)
    (image,) = signature.example(2)
    expected = module(image)
    graph.conv.weight = nn.Parameter(graph.conv.weight.detach().contiguous())
    torch.testing.assert_close(graph(image), expected)
