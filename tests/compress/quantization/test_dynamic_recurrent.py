import logging
from pathlib import Path

import onnx
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.export.onnx.stage import ExportOnnx
from compress.export.torchscript.stage import ExportTorchScript
from compress.quantization.stages.dynamic import QuantizeDynamic
from tests.compress.quantization.builders import answer, build_model, relative_error
from tests.compress.quantization.conftest import FreshProcessCheck
from tests.export.builders import needs_32_bit_sums

LENGTH = 12
TOKENS = Signature(inputs=(TensorSpec(name="tokens", shape=("batch", LENGTH), dtype="int64"),))
KERNELS = {"GRU": "gru", "RNN": "rnn_tanh"}
TWO_WAYS = {"both_ways": True, "layers": 2}
KINDS = [
    pytest.param("LSTM", {}, marks=pytest.mark.soak),  # one of the two ways of the next
    ("LSTM", TWO_WAYS),
    pytest.param("GRU", {}, marks=pytest.mark.slow),
    pytest.param("RNN", {}, marks=pytest.mark.slow),
]


SAMPLE = torch.randint(0, 50, (5, LENGTH), generator=torch.Generator().manual_seed(0))


def quantized(root: Path, kind: str, arguments: dict[str, int]) -> tuple[EagerModel, GraphModel]:
    model = build_model(root / "source", "recurrences:classifier", TOKENS, kind=kind, **arguments)
    return model, QuantizeDynamic()(model, Context(root=root / "int8"))


@needs_32_bit_sums
@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_recurrent_weights_are_integers_in_every_format(
    tmp_path: Path, kind: str, arguments: dict[str, int]
) -> None:
    model, small = quantized(tmp_path, kind, arguments)
    assert small.manifest.facts["float_modules"] == []
    assert small.manifest.facts["weights_alone"] == ([] if kind == "LSTM" else [KERNELS[kind]])
    assert small.parameters() == model.parameters()
    floats = [t for t in small.program().state_dict.values() if t.is_floating_point()]
    assert all(t.dim() == 1 for t in floats)
    assert 0 < relative_error(answer(model, SAMPLE), answer(small, SAMPLE)) < 0.03
    exported = ExportOnnx()(small, Context(root=tmp_path / "onnx"))
    assert exported.parameters() == model.parameters()
    module = model.load()
    matrices = sum(p.numel() for p in module.rnn.parameters() if p.dim() == 2)
    assert exported.macs() == LENGTH * matrices + module.head.weight.numel()
    tensors = onnx.load(exported.payload_path).graph.initializer
    assert sum(len(t.raw_data) for t in tensors) < 0.4 * 4 * model.parameters()
    scripted = ExportTorchScript()(small, Context(root=tmp_path / "ts"))
    assert scripted.payload_bytes < 15_000 + 1.5 * model.parameters()  # code, and a byte each
    kernels = {
        "LSTM": ({"DynamicQuantizeLSTM"}, {"quantized_lstm"}, 0.03),
        "GRU": (set(), {"quantized_gru"}, 1e-5),
        "RNN": (set(), set(), 1e-5),
    }[kind]
    integer = exported.manifest.facts["integer_kernels"].keys()
    assert {k for k in integer if "MatMul" not in k} == kernels[0]
    assert scripted.manifest.facts["integer_kernels"].keys() - {"linear_dynamic"} == kernels[1]
    assert kind == "RNN" or scripted.manifest.facts["float_kernels"] == {}
    assert relative_error(answer(small, SAMPLE), answer(exported, SAMPLE)) < kernels[2]
    assert relative_error(answer(small, SAMPLE), answer(scripted, SAMPLE)) < 0.03


@pytest.mark.soak  # as the graph of test_quantize_static.py
@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    tmp_path: Path, assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    _, small = quantized(tmp_path, "LSTM", {})
    assert_same_in_fresh_process(small, SAMPLE)


@pytest.mark.slow
def test_excluded_layers_stay_float(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "recurrences:classifier", TOKENS, kind="LSTM")
    small = QuantizeDynamic(exclude=("rnn",))(model, Context(root=tmp_path / "int8"))
    assert small.manifest.facts["float_modules"] == ["rnn"]
    assert "lstm" not in small.manifest.facts["quantized_operators"]


class Sensors(torch.nn.Module):
    """Two LSTMs on eight signals, the first of which is large and counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = torch.nn.LSTM(8, 16, 2, batch_first=True)
        self.head = torch.nn.Linear(16, 4)
        with torch.no_grad():
            self.lstm.weight_ih_l0[:, 0] = 0

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(signals)[0][:, -1])


@needs_32_bit_sums
def test_an_lstm_whose_inputs_need_more_than_8_bits_is_computed_in_float(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signals = torch.randn(16, LENGTH, 8, generator=torch.Generator().manual_seed(1))
    signals[..., 0] *= 1000
    net = Sensors().eval()
    small = compress.quantize_dynamic(net, example_inputs=(signals[:2],))
    caplog.set_level(logging.WARNING)
    val = DataLoader(TensorDataset(signals), 8)
    exported = compress.export_onnx(small, tmp_path / "sensors.onnx", val=val)
    operators = exported.manifest.facts["operators"]
    assert (operators["LSTM"], operators["DynamicQuantizeLSTM"]) == (1, 1)
    assert "LSTM 1 of 2 is computed in float" in caplog.text
    assert exported.parameters() == sum(weight.numel() for weight in net.parameters())
    assert (tmp_path / "sensors.onnx").stat().st_size < 2.5 * exported.parameters()
    with torch.no_grad():
        assert relative_error(net(signals), answer(exported, signals)) < 0.03
