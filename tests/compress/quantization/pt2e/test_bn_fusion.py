"""BatchNorms that torchao would fold wrongly stay where they are."""

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import qat_utils

from compress.common.signature import Signature, TensorSpec
from compress.data.batch import Batch
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.mixed_precision.half_graph import PrecisionConverter, convert_precision
from compress.quantization.pt2e.graph_capture import capture
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.ptq.calibrate import (
    Corrections,
    DynamicQuantizer,
    convert,
    prepare,
    quantize_dynamic,
)

IMAGE = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))


class Shared(nn.Module):
    """One convolution; who reads it is the test's choice."""

    def __init__(self, readers: str) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        for norm in self.norms:
            nn.init.uniform_(norm.running_mean, -1, 1)
            nn.init.uniform_(norm.weight, 0.5, 2)
        self.readers = readers

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        match self.readers:
            case "its norm":
                return first(self.conv(image))
            case "its norm and a sum":
                products = self.conv(image)
                return first(products) + products
            case "two norms":
                return first(self.conv(image)) + second(self.conv(-image))
            case _:
                return first(self.conv(image)) + first(self.conv(-image))


@pytest.mark.parametrize(
    ("readers", "left"),
    [("its norm", 0), ("its norm and a sum", 1), ("two norms", 2), ("one norm, twice", 0)],
)
def test_a_prepared_graph_answers_as_the_model(
    readers: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module = Shared(readers).eval()
    graph = capture(module, IMAGE)
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax")
    prepared = prepare(graph, quantizer)
    assert sum("batch_norm" in str(node.target) for node in prepared.graph.nodes) == left
    image = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(prepared(image), module(image), atol=1e-5, rtol=1e-5)
    # torchao's patterns of training, which it would trace for a BatchNorm that is left.
    monkeypatch.delattr(qat_utils, "_get_aten_graph_module_for_pattern")
    integers = convert(prepared)
    assert sum("batch_norm" in str(node.target) for node in integers.graph.nodes) == left
    with torch.no_grad():
        expected, found = module(image), integers(image)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()


def dynamic(module: nn.Module, image: torch.Tensor):
    quantizer = DynamicQuantizer(scheme_for("onnxruntime-cpu"), embeddings=True)
    return quantize_dynamic(module, IMAGE, quantizer, (), Corrections())


def half(module: nn.Module, image: torch.Tensor):
    converter = PrecisionConverter(torch.bfloat16, 2.0)
    return convert_precision(module, IMAGE, converter, [Batch((image,), None)], lambda _: None)


@pytest.mark.parametrize("quantize", [dynamic, half])
@pytest.mark.parametrize("readers", ["its norm", "its norm and a sum", "two norms"])
def test_layers_that_stay_float_answer_as_before(readers: str, quantize) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Shared(readers), nn.Flatten(), nn.Linear(256, 3)).eval()
    image = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        found, expected = quantize(module, image).module()(image), module(image)
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()
