from pathlib import Path

import onnx
import pytest
import torch
from pydantic import ValidationError
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.common.tensor_difference import relative_error
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.algorithms.weight_rounding import hqq, round_to_nearest
from compress.quantization.ptq.weight_only_graph import WeightQuantizer, quantize_weights
from compress.quantization.stages.weight_only import QuantizeWeights
from tests.compress.quantization.builders import IMAGE, TOKENS, answer, build_model
from tests.compress.quantization.conftest import FreshProcessCheck
from tests.export.builders import needs_32_bit_sums

ROUNDINGS = {"rtn": round_to_nearest, "hqq": hqq}


def quantized(model: EagerModel, root: Path, data: Splits | None = None, **settings: object):
    return QuantizeWeights.model_validate(settings)(model, Context(root=root, data=data))


def round_by_groups(layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Round each 16 numbers of a row to 8 bits, their largest magnitude to 127; a forward hook."""
    groups = inputs[0].unflatten(-1, (-1, 16))
    step = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / step).round() * step).flatten(-2)


@pytest.mark.parametrize(
    ("method", "bits", "activation_bits"),
    [
        pytest.param("rtn", 4, 8, marks=pytest.mark.slow),
        pytest.param("rtn", 8, 8, marks=[pytest.mark.soak, needs_32_bit_sums]),
        ("rtn", 4, 32),
        pytest.param("hqq", 4, None, marks=pytest.mark.slow),
    ],
)
def test_both_runtimes_compute_with_the_rounded_weights(
    tmp_path: Path, method: str, bits: int, activation_bits: int | None
) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    settings = {"method": method, "bits": bits, "group_size": 16, "embeddings": False}
    if activation_bits:
        settings["activation_bits"] = activation_bits
    small = quantized(model, tmp_path / "small", **settings)
    exported = ExportOnnx()(small, Context(root=tmp_path / "onnx"))
    module = model.load()
    with torch.no_grad():
        for layer in (module.up, module.down):
            layer.weight.copy_(ROUNDINGS[method](layer.weight, bits, 16).dequantize())
            if activation_bits == 8:
                layer.register_forward_pre_hook(round_by_groups)
    (tokens,) = TOKENS.example(4)
    with torch.inference_mode():
        expected = module(tokens)
    # A number that lies between two integers may be rounded to either; without any rounding of
    # activations the answers are 1e-3 of their norm apart.
    assert relative_error(expected, answer(small, tokens)) < 1e-4
    assert relative_error(expected, answer(exported, tokens)) < 1e-4
    assert exported.manifest.facts["operators"]["MatMulNBits"] == 2
    assert "Round" not in exported.manifest.facts["operators"]
    assert small.parameters() == exported.parameters() == model.parameters()
    assert small.macs() == exported.macs() == model.macs()


def test_hqq_multiplies_floats() -> None:
    with pytest.raises(ValidationError, match="hqq multiplies floats, found activation_bits: 8"):
        QuantizeWeights(method="hqq", activation_bits=8)


def test_hqq_is_not_symmetric() -> None:
    with pytest.raises(ValidationError, match="hqq fits zero points, found symmetric: true"):
        QuantizeWeights(method="hqq", symmetric=True)


@pytest.mark.parametrize(
    "method", ["rtn", *(pytest.param(m, marks=pytest.mark.slow) for m in ("gptq", "awq"))]
)
def test_symmetric_weights_run_as_they_are_rounded(tmp_path: Path, method: str) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    rows = [(image, torch.tensor(0)) for image in IMAGE.example(64)[0]]
    data = Splits({"train": rows, "val": rows}, batch_size=64)
    settings = {"method": method, "symmetric": True, "activation_bits": 32}
    small = quantized(model, tmp_path / "small", data, **settings)
    zeros = [x for name, x in small.program().state_dict.items() if name.endswith("_zero_point")]
    assert zeros and all((x == 8).all() for x in zeros)
    exported = ExportOnnx()(small, Context(root=tmp_path / "onnx"))
    (images,) = IMAGE.example(4)
    assert relative_error(answer(small, images), answer(exported, images)) < 1e-5
    products = onnx.load(exported.payload_path).graph.node
    sizes = {len(node.input) for node in products if node.op_type == "MatMulNBits"}
    assert sizes == {3}, "onnxruntime's zero point is that one"


def test_hqq_is_refused_where_no_runtime_takes_it() -> None:
    with pytest.raises(ValidationError, match="method hqq is for bits: 4, found bits: 8"):
        QuantizeWeights(method="hqq", bits=8)


def test_only_matrices_that_are_looked_up_to_be_multiplied_are_packed(tmp_path, caplog) -> None:
    model = build_model(tmp_path / "source", "networks:Banks", TOKENS)
    caplog.set_level("INFO")
    small = quantized(model, tmp_path / "small", method="hqq", group_size=16)
    state = small.program().state_dict
    assert small.manifest.facts["quantized_operators"] == {"experts": 1}
    assert state["multiplied_packed"].shape == (50, 16, 8)
    assert state["multiplied_zero_point"].dtype == torch.uint8  # as onnxruntime looks it up
    assert "50 % of the weights stay in float32" in caplog.text
    (tokens,) = TOKENS.example(4)
    weight = model.load().multiplied
    rounded = round_to_nearest(weight.detach().flatten(0, 1), 4, 16).dequantize().view_as(weight)
    ids = tokens.flatten()
    with torch.no_grad():
        expected = torch.bmm(rounded[ids], 1 + model.load().added[ids]).unflatten(0, tokens.shape)
    torch.testing.assert_close(answer(small, tokens), expected)


@pytest.mark.slow
def test_files_shrink_with_the_bits(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    small = quantized(model, tmp_path / "small", method="rtn", group_size=16)
    state = small.program().state_dict
    held = {name: t.numel() for name, t in state.items() if t.dtype is torch.uint8}
    assert held["up_weight_packed"] == held["down_weight_packed"] == 16 * 64 // 2
    assert held["embedding_weight_rows_packed"] == 50 * 16
    assert {n for n, t in state.items() if t.is_floating_point() and t.dim() > 1} == {
        "up_weight_scale",
        "down_weight_scale",
        "embedding_weight_rows_scale",
    }


def table_of_width(folder: Path, width: int) -> EagerModel:
    """Return a table with rows of a width, and a linear layer that reads them."""
    layers = f"nn.Embedding(50, {width}), nn.Linear({width}, 16)"
    source = f"from torch import nn\n\n\ndef table():\n    return nn.Sequential({layers})\n"
    (folder / "tables.py").write_text(source)
    return build_model(folder / "source", "tables:table", TOKENS, folder)


@pytest.mark.slow
def test_both_runtimes_look_up_four_bits(tmp_path: Path) -> None:
    model = table_of_width(tmp_path, 48)  # three groups, whose zero points fill one byte and a half
    small = quantized(model, tmp_path / "small", embedding_bits=4, exclude=["1"])
    exported = ExportOnnx()(small, Context(root=tmp_path / "onnx"))
    module = model.load()
    with torch.no_grad():
        table = module[0].weight
        table.copy_(round_to_nearest(table, 4, 16).dequantize())
    (tokens,) = TOKENS.example(4)
    with torch.inference_mode():
        expected = module(tokens)
    assert relative_error(expected, answer(small, tokens)) < 1e-6
    assert relative_error(expected, answer(exported, tokens)) < 1e-6
    operators = exported.manifest.facts["operators"]
    assert (operators["GatherBlockQuantized"], operators.get("Gather")) == (1, None)
    assert small.parameters() == exported.parameters() == model.parameters()
    assert small.macs() == exported.macs() == model.macs()


def test_tables_of_odd_width_are_refused_in_four_bits(tmp_path: Path) -> None:
    model = table_of_width(tmp_path, 24)
    with pytest.raises(
        StageFailed, match="multiple of 16 numbers, found 24; set embedding_bits: 8"
    ):
        quantized(model, tmp_path / "none", embedding_bits=4)


@pytest.mark.slow
def test_gptq_needs_data(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp", IMAGE)
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(256, 6, generator=generator) @ torch.randn(6, 64, generator=generator)
    rows = [(image, torch.tensor(0)) for image in flat.view(-1, 1, 8, 8)]
    data = Splits({"train": rows, "val": rows}, batch_size=64)
    with pytest.raises(StageFailed, match="needs data"):
        quantized(model, tmp_path / "none", method="gptq")
    images = torch.stack([image for image, _ in rows])
    expected = answer(model, images)
    errors = {}
    for method in ("rtn", "gptq"):
        small = quantized(model, tmp_path / method, data, method=method, calibration_samples=256)
        errors[method] = float((answer(small, images) - expected).norm() / expected.norm())
    assert errors["gptq"] < 0.6 * errors["rtn"]


class Unrolled(torch.nn.Module):
    """A recurrent layer whose steps are layers of the graph, which all read the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step = torch.nn.Embedding(10, 32), torch.nn.Linear(32, 32)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(first) + self.embed(last)
        for _ in range(4):
            hidden = torch.tanh(self.step(hidden))
        return hidden


def test_a_weight_that_several_layers_read_counts_once() -> None:
    ids = [TensorSpec(name=n, shape=("batch", 4), dtype="int64") for n in ("first", "last")]
    signature = Signature(inputs=tuple(ids), outputs=(OutputSpec(name="y"),))
    quantizer = WeightQuantizer(QuantizeWeights(bits=8, group_size=32))
    program = quantize_weights(Unrolled(), signature, quantizer, ())
    assert quantizer.quantized == {"embedding": 1, "linear": 1}
    packed = [name for name in program.state_dict if name.endswith("_packed")]
    assert packed == ["embed_weight_rows_packed", "step_weight_packed"]


def test_weights_left_in_float_are_reported(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    small = quantized(model, tmp_path / "small", group_size=32)
    facts = {k: v for k, v in small.manifest.facts.items() if k != "fidelity"}
    assert facts == {
        "quantized_operators": {"embedding": 1, "linear": 1},
        "left_float": {"up": "16 inputs are not a multiple of group_size 32"},
    }
    with pytest.raises(StageFailed, match=r"no weight could be quantized \(up: 16 inputs"):
        quantized(model, tmp_path / "none", group_size=128, embeddings=False)
    with pytest.raises(PipelineInvalid, match="did you mean 'down'"):
        quantized(model, tmp_path / "none", exclude=["dwn"])
    assert not (tmp_path / "none").exists()


@pytest.mark.soak  # as the graph of test_quantize_static.py
@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    tmp_path: Path, assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    model = build_model(tmp_path / "source", "networks:sequence", TOKENS)
    small = quantized(model, tmp_path / "small", group_size=16)
    assert_same_in_fresh_process(small, *TOKENS.example(3))


@pytest.mark.slow
@needs_32_bit_sums
def test_awq_gives_equal_outputs_in_both_runtimes(tmp_path: Path) -> None:
    rows = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(1))
    data = Splits({"train": TensorDataset(rows, rows[:, 0])}, batch_size=32)
    outputs = (OutputSpec(name="classes"), OutputSpec(name="states"))
    signature = Signature(inputs=TOKENS.inputs, outputs=outputs)
    model = build_model(tmp_path / "source", "sequences:encoder", signature)
    settings = {"method": "awq", "bits": 8, "calibration_samples": 64}
    with pytest.raises(StageFailed, match="needs data"):
        quantized(model, tmp_path / "none", **settings)
    small = quantized(model, tmp_path / "small", data, **settings)
    assert len(small.manifest.facts["scaled"]) > 3
    expected, got = answer(model, rows), answer(small, rows)
    assert (got - expected).norm() < 0.1 * expected.norm()
    exported = ExportOnnx()(small, Context(root=tmp_path / "onnx"))
    # Activations between two integers may be rounded to either.
    assert relative_error(got, answer(exported, rows)) < 1e-3
