from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.stage import Context
from compress.quantization.stages.dynamic import QuantizeDynamic
from export.onnx.stage import ExportOnnx
from export.torchscript.stage import ExportTorchScript

HERE = Path(__file__).parent
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


def source(root: Path, kind: str, arguments: dict[str, int]) -> EagerModel:
    torch.manual_seed(0)
    recipe = Recipe(factory="recurrences:classifier", arguments={"kind": kind, **arguments})
    state = recipe.build(HERE).state_dict()
    return EagerModel.create(root / "source", recipe, state, TOKENS, folder=HERE)


def quantized(root: Path, kind: str, arguments: dict[str, int]) -> tuple[EagerModel, GraphModel]:
    model = source(root, kind, arguments)
    return model, QuantizeDynamic()(model, Context(root=root / "int8"))


def answer(model: Artifact) -> torch.Tensor:
    tokens = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
    with model.open() as predict:
        return predict(tokens)[0]


def apart(expected: torch.Tensor, got: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


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
    assert 0 < apart(answer(model), answer(small)) < 0.03
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
    assert apart(answer(small), answer(exported)) < kernels[2]
    assert apart(answer(small), answer(scripted)) < 0.03


@pytest.mark.slow
def test_a_fresh_process_answers_alike(tmp_path: Path, fresh_torch: Callable[[str], str]) -> None:
    _, small = quantized(tmp_path, "LSTM", {})
    torch.save(answer(small), tmp_path / "answer.pt")
    assert (
        fresh_torch(f"""
import torch
from compress.artifacts.graph_model import GraphModel
tokens = torch.randint(0, 50, (5, 12), generator=torch.Generator().manual_seed(0))
with GraphModel.from_directory({str(small.path)!r}).open() as predict:
    print(torch.equal(predict(tokens)[0], torch.load({str(tmp_path / "answer.pt")!r})))
""")
        == "True"
    )


def test_excluded_layers_stay_float(tmp_path: Path) -> None:
    model = source(tmp_path, "LSTM", {})
    small = QuantizeDynamic(exclude=("rnn",))(model, Context(root=tmp_path / "int8"))
    assert small.manifest.facts["float_modules"] == ["rnn"]
    assert "lstm" not in small.manifest.facts["quantized_operators"]
