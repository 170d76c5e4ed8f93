"""The share of the multiply-accumulates that integer kernels do, of networks counted by hand."""

from pathlib import Path

import pytest

import compress
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.gates import MinIntegerMacs
from compress.core.stage import Stage
from compress.export.onnx.stage import ExportOnnx
from compress.export.torchscript.stage import TorchScriptModel
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from tests.export.builders import IMAGE, images, network_of, samples

NETWORK = """
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Conv2d(1, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.wide = nn.Conv2d(16, 32, 3)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.flat = nn.Linear(8 * 12 * 12, 64)
        self.steps = nn.LSTM(16, 8, batch_first=True)
        self.last = nn.Linear(4 * 8, 4)

    def forward(self, x):
        x = self.wide(self.depthwise(self.image(x).relu()).relu()).relu()
        x = self.flat(self.up(x).flatten(1)).relu().reshape(-1, 4, 16)
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        return self.last(self.steps(x)[0].flatten(1))
"""
IMAGE_MACS, DEPTHWISE, WIDE = 64 * 16 * 9, 64 * 16 * 9, 36 * 32 * 16 * 9
UP, FLAT, PRODUCT = 36 * 32 * 8 * 4, 8 * 144 * 64, 4 * 4 * 16
STEPS, LAST = 4 * 4 * 8 * (16 + 8), 32 * 4
ALL = IMAGE_MACS + DEPTHWISE + WIDE + UP + FLAT + 2 * PRODUCT + STEPS + LAST
CONVOLUTIONS = IMAGE_MACS + DEPTHWISE + WIDE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("mixed")
    return network_of(folder, NETWORK, "mixed:Mixed", IMAGE)


NORMALIZED = """
from torch import nn

def network():
    layers = []
    for inputs in (1, 16, 16):
        layers += [nn.Conv2d(inputs, 16, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(16)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 4)).eval()
"""


def test_batch_norm_behind_an_activation_is_no_convolution(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network_of(tmp_path, NORMALIZED, "normalized:network", IMAGE)
    context = Context(root=tmp_path / "int8", data=samples(images(32)))
    whole = ExportOnnx()(model, context.with_root(tmp_path / "float")).manifest.facts
    assert sum(whole["float_kernels"].values()) == 4 and whole["integer_share"] == 0
    some = QuantizeStatic(calibration_samples=32, exclude=("3", "6"))(model, context)
    facts = ExportOnnx()(some, context.with_root(tmp_path / "onnx")).manifest.facts
    assert sum(facts["float_kernels"].values()) == 2
    assert "quantized, yet computed in floats" not in caplog.text
    macs = (64 * 16 * 9, 64 * 16 * 16 * 9, 64 * 16 * 16 * 9, 64 * 16 * 4)
    assert facts["integer_share"] == pytest.approx((macs[0] + macs[3]) / sum(macs), rel=1e-12)


@pytest.mark.parametrize(
    ("stage", "in_integers"),
    [
        (None, 0),
        (QuantizeStatic(calibration_samples=32), CONVOLUTIONS + FLAT + PRODUCT + LAST),
        pytest.param(QuantizeDynamic(), FLAT + STEPS + LAST, marks=pytest.mark.slow),
        pytest.param(QuantizeWeights(bits=4, method="rtn"), FLAT + LAST, marks=pytest.mark.slow),
        pytest.param(
            # Float products, as in the first.
            *(QuantizeWeights(bits=4, method="rtn", activation_bits=32), 0),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_share_is_that_of_counting_by_hand(
    model: EagerModel, tmp_path: Path, stage: Stage | None, in_integers: int
) -> None:
    context = Context(root=tmp_path / "int8", data=samples(images(32)))
    source = stage(model, context) if stage else model
    exported = ExportOnnx()(source, context.with_root(tmp_path / "onnx"))
    assert exported.manifest.facts["integer_share"] == pytest.approx(in_integers / ALL, rel=1e-12)
    for share in (in_integers / ALL - 1e-9, in_integers / ALL + 1e-9):
        if share > 0:
            verdict = MinIntegerMacs(share=share).evaluate(model, exported, context)
            assert verdict.passed == (share < in_integers / ALL)


def test_a_file_that_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    source = "from torch import nn\n\nclass Doubled(nn.Module):\n    def forward(self, x):\n"
    signature = compress.Signature(inputs=(compress.TensorSpec(name="x", shape=("batch", 4)),))
    model = network_of(tmp_path, f"{source}        return x + x\n", "doubled:Doubled", signature)
    exported = ExportOnnx()(model, Context(root=tmp_path / "onnx"))
    with pytest.raises(StageFailed, match="cannot be counted: it has none, or"):
        MinIntegerMacs(share=0.9).measure(model, exported, Context(root=tmp_path))


def test_runtimes_whose_kernels_are_not_counted_are_named() -> None:
    problem = MinIntegerMacs(share=0.9).unsuitable_artifact(TorchScriptModel)
    assert problem.startswith("is for the results of export_onnx, export_aot and export_executorch")
    assert "found torchscript" in problem


SPLIT = """
import torch
from torch import nn

class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.one = nn.Conv2d(1, 8, 3), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        a, b = self.before(x).relu().split([4, 4], 1)
        return torch.cat([a, b, self.one(b).relu()], 1).mean((2, 3))
"""


def test_an_operator_with_several_outputs_is_exported_without_a_note_of_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network_of(tmp_path, SPLIT, "split:Split", IMAGE)
    context = Context(root=tmp_path / "int8", data=samples(images(32)))
    int8 = QuantizeStatic(calibration_samples=32)(model, context)
    ExportOnnx()(int8, context.with_root(tmp_path / "onnx"))
    assert not [record for record in caplog.records if record.name.startswith("torch.onnx")]
