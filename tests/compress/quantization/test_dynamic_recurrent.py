from pathlib import Path

import onnx
import pytest
import torch

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
    ("LSTM", {}),
    pytest.param("LSTM", TWO_WAYS, marks=pytest.mark.slow),
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
