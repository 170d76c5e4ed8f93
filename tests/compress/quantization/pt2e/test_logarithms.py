"""Which layers stay float because a logarithm is taken of what they make."""

import pytest
import torch
from torch import nn

from compress.common.signature import Signature, TensorSpec
from compress.data.batch import Batch
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.numeric_debug.sqnr import Deviation
from compress.quantization.pt2e import quantizer as quantizer_module
from compress.quantization.pt2e.graph_capture import capture, fake_quantized
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.ptq.calibrate import Corrections, prepare_calibrated

WAVES = Signature(inputs=(TensorSpec(name="wave", shape=("batch", 2, 256)),))


class Spectrum(nn.Module):
    """Logarithms of a filter bank's powers, as speech models read them, and two layers."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv1d(2, 2, 3, padding=1)
        nn.init.zeros_(self.first.bias)
        self.filters = nn.Conv1d(2, 32, 64, stride=32, bias=bias)
        self.mel = nn.Linear(16, 8, bias=False)
        self.mel.weight.data.abs_()
        self.layers = nn.Sequential(nn.Conv1d(8, 16, 1), nn.ReLU(), nn.Conv1d(16, 4, 1))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        parts = self.filters(self.first(wave)).unflatten(1, (16, 2))
        powers = parts.square().sum(2)
        logs = self.mel(powers.transpose(1, 2)).clamp(min=1e-9).log()
        return self.layers(logs.transpose(1, 2))


def waves() -> list[Batch]:
    """Return waves of which one is 1e5 times as loud as another."""
    generator = torch.Generator().manual_seed(0)
    loudness = 10 ** torch.linspace(-5, 0, 16).view(16, 1, 1)
    return [Batch((loudness * torch.randn(16, 2, 256, generator=generator),), None)]


def decibels(module: nn.Module, quantizer: OnnxRuntimeQuantizer) -> float:
    graph = capture(module.eval(), WAVES)
    prepared = prepare_calibrated(graph, WAVES, quantizer, waves(), lambda _: None, Corrections())
    (wave,) = waves()[0].inputs
    deviation = Deviation()
    with torch.inference_mode():
        deviation.add(module(wave), fake_quantized(prepared)(wave))
    return deviation.sqnr_db


@pytest.mark.parametrize("bias", [False, True])
def test_what_makes_a_logarithms_input_stays_float_back_to_a_layer_with_a_bias(bias: bool) -> None:
    found = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax")
    decibels(Spectrum(bias), found)
    in_float = {"filters", "mel"} if bias else {"first", "filters", "mel"}
    assert set(found.float_modules) == in_float
    assert found.quantized["conv1d"] == 5 - len(in_float)


def test_a_spectrum_in_float_is_nearer_by_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise() -> float:
        return decibels(Spectrum(), OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), "minmax"))

    in_float = noise()
    monkeypatch.setattr(quantizer_module, "LOGARITHMS", set())
    assert in_float > noise() + 20
