import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.graph.torch_export import export_program
from compress.quantization.algorithms import input_scaling
from compress.quantization.algorithms.input_scaling import (
    STRENGTHS,
    InputStatistics,
    best_strength,
    channel_scales,
    shared_input_groups,
    smooth_,
)
from compress.quantization.config.dtype_scheme import scheme_for
from compress.quantization.pt2e.graph_capture import functionalize
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.conftest import FreshProcessCheck

HERE = Path(__file__).parents[1]
TOKENS = Signature(
    inputs=(TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="classes"), OutputSpec(name="states")),
)
STAGES = {"static": QuantizeStatic, "dynamic": QuantizeDynamic}


@pytest.fixture(scope="module")
def data() -> Splits:
    rows = torch.randint(0, 50, (96, 12), generator=torch.Generator().manual_seed(1))
    train, val = (TensorDataset(part, part[:, 0]) for part in rows.split((64, 32)))
    return Splits({"train": train, "val": val}, batch_size=32)


def module(activation: str = "gelu") -> torch.nn.Module:
    torch.manual_seed(0)
    recipe = Recipe(factory="sequences:encoder", arguments={"activation": activation})
    return recipe.build(HERE).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    recipe = Recipe(factory="sequences:encoder")
    path = tmp_path_factory.mktemp("encoder") / "source"
    return EagerModel.create(path, recipe, module().state_dict(), TOKENS, folder=HERE)


@functools.cache
def program(activation: str) -> tuple[torch.nn.Module, torch.export.ExportedProgram]:
    encoder = module(activation)
    return encoder, functionalize(export_program(encoder, TOKENS))


def capture(activation: str = "gelu") -> torch.fx.GraphModule:
    return program(activation)[1].module(check_guards=False)


def answers(model: EagerModel | GraphModel | OnnxModel, data: Splits) -> torch.Tensor:
    with model.open() as predict:
        return torch.cat([predict(*batch.inputs)[0] for batch in data.batches("val")])


@pytest.mark.parametrize("strength", [0.3, 0.5, 0.8])
def test_scales_are_the_papers(strength: float) -> None:
    """Equation 4: max|X_j| ** strength / max|W_j| ** (1 - strength)."""
    weight = torch.tensor([[0.5, -4.0, 0.0, 2.0, 1e-9], [-1.0, 3.0, 0.0, 1.0, 1e-9]])
    largest = torch.tensor([8.0, 0.25, 5.0, 0.0, 2.0])
    expected = [
        8**strength / 1 ** (1 - strength),
        0.25**strength / 4 ** (1 - strength),
        1.0,  # never used
        1.0,  # always 0
        2**strength / 1e-5 ** (1 - strength),
    ]
    assert channel_scales(weight, largest, strength).tolist() == pytest.approx(expected, rel=1e-5)
    tiny = channel_scales(torch.full((1, 1), 1e9), torch.tensor([1e-9]), strength)
    assert float(tiny) == pytest.approx(1e-5)


def grid(values: np.ndarray, low: float, high: float, least: int, most: int) -> np.ndarray:
    scale = max((high - low) / (most - least), 1e-5)
    zero = np.round(least - low / scale)
    return (np.clip(np.round(values / scale + zero), least, most) - zero) * scale


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "tensorrt"])
@pytest.mark.parametrize("outlier", [1, 4, 30, 200])
@pytest.mark.parametrize("offset", [0.0, 3.0, -3.0])
def test_the_strength_is_the_smallest_near_the_best(
    target: str, outlier: float, offset: float
) -> None:
    drawn = np.random.default_rng(0)
    rows, weight = drawn.standard_normal((64, 24)) + offset, drawn.standard_normal((12, 24))
    rows[:, ::8] *= outlier
    low, high = rows.min(0) * 1.5, rows.max(0) * 1.5  # other samples went further
    scheme = scheme_for(target)
    ends = scheme.activations.quant_min, scheme.activations.quant_max
    tensors = [torch.from_numpy(a) for a in (weight, rows, low, high)]
    seen = InputStatistics(
        low_I=tensors[2], high_I=tensors[3], rows=[tensors[1][:40], tensors[1][40:]]
    )

    def error(scale: np.ndarray) -> float:
        below, above = min(0, (low / scale).min()), max(0, (high / scale).max())
        held = [grid(row, -abs(row).max(), abs(row).max(), -127, 127) for row in weight * scale]
        answers = grid(rows / scale, below, above, *ends) @ np.stack(held).T
        return ((answers - rows @ weight.T) ** 2).mean()

    largest = torch.from_numpy(np.maximum(abs(low), abs(high)))
    plain = error(np.ones(24))
    gains = {
        strength: 10
        * np.log10(plain / error(channel_scales(tensors[0], largest, strength).numpy()))
        for strength in STRENGTHS
    }
    best = max(gains.values())
    least = min(strength for strength, gain in gains.items() if gain >= best - 1)
    assert best_strength(tensors[0], seen, scheme, best - 0.01) == least
    assert best_strength(tensors[0], seen, scheme, best + 0.01) == 0


def test_weights_that_are_exact_are_not_smoothed() -> None:
    rows = torch.tensor([[3.0, -1.0], [0.0, 2.0]])
    seen = InputStatistics(low_I=rows.amin(0), high_I=rows.amax(0), rows=[rows])
    assert best_strength(torch.zeros(4, 2), seen, scheme_for("onnxruntime-cpu"), 0.0) == 0


@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 3.0), (-3.0, -0.5), (0.0, 1e-9)])
def test_fake_quantized_activations_match_numpy(low: float, high: float) -> None:
    values = torch.linspace(-4, 4, 50, dtype=torch.float64)  # beyond both ends, too
    for numbers in (scheme_for("onnxruntime-cpu").activations, scheme_for("tensorrt").activations):
        found = input_scaling._fake_quantize_tensor(values, low, high, numbers)
        expected = grid(
            values.numpy(), min(low, 0), max(high, 0), numbers.quant_min, numbers.quant_max
        )
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_smoothing_changes_no_output(data: Splits, activation: str) -> None:
    encoder, _ = program(activation)
    before = copy.deepcopy(encoder.state_dict())
    graph = capture(activation)
    (tokens,) = TOKENS.example(5)
    expected = graph(tokens)
    strengths, _ = smooth_(graph, list(data.batches("train")), scheme_for("onnxruntime-cpu"), 0.8)
    assert len(strengths) == 9
    for got, want in zip(graph(tokens), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(p, before[n]) for n, p in graph.named_parameters())
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, before[name]), "the user's own weights"


@pytest.mark.parametrize(("activation", "multiplied"), [("gelu", 3), ("relu", 1)])
def test_the_operator_before_absorbs_the_scale(
    data: Splits, activation: str, multiplied: int
) -> None:
    graph = capture(activation)
    smooth_(graph, list(data.batches("train")), scheme_for("onnxruntime-cpu"), 0.8)
    # Norms, layers before a relu, and the values of attention do; a gelu cannot, nor can a norm
    # that is an output too.
    assert len([n for n, _ in graph.named_buffers() if "smoothing" in n]) == multiplied


def test_layers_that_read_one_tensor_share_one_scale(data: Splits) -> None:
    graph = capture()
    names = [[n.args[1].target for n in family.linears] for family in shared_input_groups(graph)]
    assert ["layers.0.query.weight", "layers.0.key.weight", "layers.0.value.weight"] in names
    before = dict(graph.named_parameters())
    smooth_(graph, list(data.batches("train")), scheme_for("onnxruntime-cpu"), 0.5)
    after = dict(graph.named_parameters())
    key, query = (
        after[f"layers.0.{n}.weight"] / before[f"layers.0.{n}.weight"] for n in ("key", "query")
    )
    torch.testing.assert_close(key, query, rtol=1e-3, atol=0)
    assert key.max() > 5 * key.min()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", pytest.param("dynamic", marks=pytest.mark.soak)])
def test_smoothing_lowers_the_error_of_outliers(
    tmp_path: Path, model: EagerModel, data: Splits, kind: str
) -> None:
    expected, errors = answers(model, data), {}
    for smooth in ("off", "auto"):
        context = Context(root=tmp_path / str(smooth), data=data)
        stage = STAGES[kind].model_validate({"smooth": smooth, "calibration_samples": 64})
        errors[smooth] = float((answers(stage(model, context), data) - expected).norm())
    assert errors["auto"] < 0.6 * errors["off"]


def test_layers_of_rows_are_smoothed_where_activations_are_float(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 16)),))
    recipe = Recipe(factory="sequences:rows")
    state = recipe.build(HERE).state_dict()
    net = EagerModel.create(tmp_path / "source", recipe, state, signature, folder=HERE)
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    data = Splits({"train": TensorDataset(x, x[:, 0]), "val": TensorDataset(x, x[:, 0])})
    expected, errors, smoothed = answers(net, data), {}, {}
    for kind, smooth in (("dynamic", "off"), ("dynamic", "auto"), ("static", "auto")):
        stage = STAGES[kind].model_validate({"smooth": smooth, "calibration_samples": 64})
        graph = stage(net, Context(root=tmp_path / kind / smooth, data=data))
        errors[kind, smooth] = float((answers(graph, data) - expected).norm())
        smoothed[kind] = graph.manifest.facts.get("smoothed")
        if (kind, smooth) == ("dynamic", "auto"):
            exported = ExportOnnx()(graph, Context(root=tmp_path / "onnx"))
            assert exported.manifest.facts["integer_kernels"] == {"DynamicQuantizeMatMul": 3}
    assert errors["dynamic", "auto"] < 0.3 * errors["dynamic", "off"]
    assert "2" in smoothed["dynamic"]
    # A gelu cannot take a division up, and between integers there is no place for one.
    assert "2" not in smoothed["static"]


def test_auto_skips_layers_that_gain_nothing(tmp_path: Path, data: Splits) -> None:
    recipe = Recipe(factory="networks:sequence")
    torch.manual_seed(0)
    signature = Signature(inputs=TOKENS.inputs)
    state = recipe.build(HERE).state_dict()
    plain = EagerModel.create(tmp_path / "source", recipe, state, signature, folder=HERE)
    found = {}
    for smooth in ("auto", "off"):
        stage = QuantizeDynamic(smooth=smooth, calibration_samples=64)
        found[smooth] = stage(plain, Context(root=tmp_path / smooth, data=data))
    assert found["auto"].manifest.facts["smoothed"] == {}
    files = {found[smooth].payload_path.read_bytes() for smooth in found}
    assert len(files) == 1


@pytest.mark.slow
def test_both_runtimes_and_a_fresh_process_answer_alike(
    tmp_path: Path, model: EagerModel, data: Splits, assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    stage = QuantizeDynamic(smooth=0.8, calibration_samples=64)
    small = stage(model, Context(root=tmp_path / "int8", data=data))
    assert set(small.manifest.facts["smoothed"].values()) == {0.8}
    exported = ExportOnnx()(small, Context(root=tmp_path / "onnx"))
    expected = answers(small, data)
    torch.testing.assert_close(answers(exported, data), expected, rtol=0, atol=2e-3)
    (batch,) = data.batches("val")
    assert_same_in_fresh_process(small, batch.inputs[0])


def test_smoothing_needs_data_and_a_strength(tmp_path: Path, model: EagerModel) -> None:
    assert not QuantizeDynamic().needs_data
    assert QuantizeDynamic(smooth="auto").needs_data
    with pytest.raises(StageFailed, match="needs data"):
        QuantizeDynamic(smooth="auto")(model, Context(root=tmp_path / "none"))
    with pytest.raises(ValidationError, match="smooth"):
        QuantizeStatic.model_validate({"smooth": 1.5})
