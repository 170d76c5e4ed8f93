from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import LabelAgreement, Parity
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.config.dtype_scheme import BuiltInObserver
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import IMAGE, NETWORKS, answer, build_model
from tests.compress.quantization.conftest import FreshProcessCheck

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))


def splits(*shapes: tuple[int, ...], samples: int = 64, batch_size: int = 32) -> Splits:
    generator = torch.Generator().manual_seed(1)
    xs = tuple(torch.randn(samples, *shape, generator=generator) for shape in shapes)
    rows = [(tuple(x[i] for x in xs), torch.tensor(0)) for i in range(samples)]
    return Splits({"train": rows, "val": rows}, batch_size)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory, digits: Splits) -> tuple[EagerModel, Context]:
    folder = tmp_path_factory.mktemp("resnet")
    sizes = {"blocks": 1, "width": 8, "classes": 10}
    model = build_model(
        folder / "source", "models:ResNet", folder=DIGITS, random_batch_norm=True, **sizes
    )
    return model, Context(root=folder / "int8", data=digits)


@pytest.fixture(scope="module")
def quantized(resnet: tuple[EagerModel, Context]) -> GraphModel:
    model, context = resnet
    return QuantizeStatic(calibration_samples=256)(model, context)


@pytest.mark.slow
def test_every_layer_of_a_resnet_is_quantized(
    resnet: tuple[EagerModel, Context], quantized: GraphModel
) -> None:
    facts = quantized.manifest.facts
    assert facts["quantized_operators"] == {"add": 3, "conv2d": 9, "linear": 1}
    assert facts["float_modules"] == []
    model, _ = resnet
    folded = 2 * sum(m.num_features for m in model.load().modules() if hasattr(m, "num_features"))
    assert quantized.parameters() == model.parameters() - folded // 2
    assert quantized.macs() == model.macs()


@pytest.mark.slow
def test_answers_stay_near_the_float_models(
    resnet: tuple[EagerModel, Context], quantized: GraphModel
) -> None:
    model, context = resnet
    assert LabelAgreement().measure(model, quantized, context).value >= 0.97


@pytest.mark.slow
def test_equal_runs_give_equal_bytes(
    resnet: tuple[EagerModel, Context], quantized: GraphModel, tmp_path: Path
) -> None:
    model, context = resnet
    again = QuantizeStatic(calibration_samples=256)(model, context.with_root(tmp_path / "again"))
    assert again.digest == quantized.digest


@pytest.mark.slow
def test_another_seed_observes_other_samples(tmp_path: Path) -> None:
    model, data = build_model(tmp_path / "source", "networks:mlp"), splits((1, 8, 8))
    stage = QuantizeStatic(calibration_samples=16)
    one, other = (
        stage(model, Context(root=tmp_path / f"{seed}", data=data, seed=seed)) for seed in (0, 1)
    )
    assert one.digest != other.digest


@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    quantized: GraphModel, assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    assert_same_in_fresh_process(quantized, *IMAGE.example(3))


@pytest.mark.slow
@pytest.mark.parametrize("observer", ["histogram", pytest.param("mse", marks=pytest.mark.soak)])
def test_pooling_and_clamps_keep_the_answers(tmp_path: Path, observer: str) -> None:
    model = build_model(tmp_path / "source", "networks:mobilenet", random_batch_norm=True)
    context = Context(root=tmp_path / observer, data=splits((1, 8, 8)))
    stage = QuantizeStatic.model_validate({"observer": observer, "calibration_samples": 64})
    assert Parity(atol=0).measure(model, stage(model, context), context) < 0.05


@pytest.mark.slow
def test_observers_choose_different_ranges(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp")
    context = Context(root=tmp_path / "int8", data=splits((1, 8, 8)))
    # With so few values, the least divergence is that of the whole range.
    observers = set(get_args(BuiltInObserver)) - {"entropy"}
    found = set()
    for observer in observers:
        graph = QuantizeStatic(observer=observer, calibration_samples=64)(
            model, context.with_root(tmp_path / observer)
        )
        assert Parity(atol=0).measure(model, graph, context) < 0.05
        found.add(graph.payload_path.read_bytes())
    assert len(found) == len(observers)


def test_excluded_modules_stay_float(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mobilenet", random_batch_norm=True)
    stage = QuantizeStatic(calibration_samples=32, exclude=("stem", "head.*"))
    graph = stage(model, Context(root=tmp_path / "int8", data=splits((1, 8, 8))))
    assert graph.manifest.facts["float_modules"] == ["head.1", "stem.0"]
    assert graph.manifest.facts["quantized_operators"] == {"avg_pool2d": 1, "conv2d": 2}


def test_an_exclude_that_names_nothing_is_refused(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mobilenet", random_batch_norm=True)
    stage = QuantizeStatic(calibration_samples=32, exclude=("pointwize",))
    with pytest.raises(PipelineInvalid, match="'pointwize'; did you mean 'pointwise'"):
        stage(model, Context(root=tmp_path / "int8", data=splits((1, 8, 8))))


def test_two_inputs_and_dict_outputs(tmp_path: Path) -> None:
    signature = Signature(
        inputs=(
            TensorSpec(name="image", shape=("batch", 1, 8, 8)),
            TensorSpec(name="context", shape=("batch", 4)),
        ),
        outputs=(OutputSpec(name="logits"), OutputSpec(name="features")),
    )
    model = build_model(tmp_path / "source", "networks:two_inputs", signature)
    context = Context(root=tmp_path / "int8", data=splits((1, 8, 8), (4,)))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    assert graph.manifest.facts["quantized_operators"] == {"conv2d": 1, "linear": 2}
    assert Parity(atol=0).measure(model, graph, context) < 0.05


def test_sequences_keep_float_results(tmp_path: Path) -> None:
    tokens = TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64")
    signature = Signature(inputs=(tokens,))
    model = build_model(tmp_path / "source", "networks:sequence", signature)
    data = torch.randint(0, 50, (64, 8))
    context = Context(
        root=tmp_path / "int8", data=Splits({"train": TensorDataset(data, data[:, 0])})
    )
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    facts = graph.manifest.facts
    assert facts["quantized_operators"] == {"embedding": 1, "linear": 2}
    assert not facts["float_modules"]
    assert not facts["saturated_ranges"]
    assert not facts["dead_ranges"]
    with model.open() as expected, graph.open() as got:
        longer = torch.randint(0, 50, (3, 20))
        torch.testing.assert_close(got(longer)[0], expected(longer)[0], atol=0.05, rtol=0)


def test_tables_keep_8_bits_beside_weights_of_4(tmp_path: Path) -> None:
    signature = Signature(
        inputs=(TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64"),)
    )
    model = build_model(tmp_path / "source", "networks:sequence", signature)
    tokens = torch.arange(320).reshape(64, 5) % 50
    data = Splits({"train": TensorDataset(tokens, tokens[:, 0])})
    context = Context(root=tmp_path / "int8", data=data)
    program = QuantizeStatic(calibration_samples=64, weight_bits=4)(model, context).program()
    tensors = {**program.state_dict, **program.constants}.values()
    levels = [t.unique().numel() for t in tensors if t.dtype is torch.int8]
    assert sorted(n > 15 for n in levels) == [False, False, True]


@pytest.mark.parametrize(("given", "meant"), [(False, "off"), ("off", "off"), (0.5, 0.5)])
def test_smoothing_is_off_if_yaml_reads_off_as_false(given: object, meant: object) -> None:
    assert QuantizeStatic.model_validate({"smooth": given}).smooth == meant


def test_a_fixed_batch_is_calibrated_in_its_own_size(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="image", shape=(4, 1, 8, 8)),))
    model = build_model(tmp_path / "source", "networks:mlp", signature)
    context = Context(root=tmp_path / "int8", data=splits((1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=32)(model, context)
    assert graph.manifest.facts["quantized_operators"] == {"linear": 3}
    with pytest.raises(StageFailed, match=r"30 and the model takes batches of 4"):
        QuantizeStatic(calibration_samples=30)(model, context)


def test_a_channel_of_zeros_keeps_its_bias(tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe = Recipe(factory="networks:mlp")
    module = recipe.build(NETWORKS)
    with torch.no_grad():
        module[5].weight[3] = 0
        module[5].bias[3] = 7.5
    model = EagerModel.create(
        tmp_path / "source", recipe, module.state_dict(), IMAGE, folder=NETWORKS
    )
    context = Context(root=tmp_path / "int8", data=splits((1, 8, 8)))
    with QuantizeStatic(calibration_samples=64)(model, context).open() as predict:
        assert predict(*IMAGE.example(2))[0][:, 3].tolist() == pytest.approx([7.5, 7.5], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["networks:aliases", "networks:branches"])
def test_writing_into_views_and_branches_keeps_the_answers(tmp_path: Path, factory: str) -> None:
    model = build_model(tmp_path / "source", factory)
    context = Context(root=tmp_path / "int8", data=splits((1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    assert Parity(atol=0).measure(model, graph, context) < 0.03


def scaled(path: Path, weight: float, bias: float) -> EagerModel:
    """Return a layer with weights of a scale, the bias of its first unit given and the rest 0."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 4)
    state = {"weight": module.weight.detach() * weight, "bias": torch.tensor([bias, 0, 0, 0])}
    recipe = Recipe(factory="torch.nn:Linear", arguments={"in_features": 4, "out_features": 4})
    return EagerModel.create(path, recipe, state, ROWS)


def scaled_rows(scale: float) -> Splits:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1)) * scale
    return Splits({"train": TensorDataset(x, x[:, 0]), "val": TensorDataset(x, x[:, 0])})


OBSERVERS = ("minmax", "moving_average", "histogram")
SCALES = ((1e-5, 1.0), (1.0, 1e-4), (1e-5, 1e-4), (1e5, 1.0))
RANGES_IN_CI = {
    *((1.0, 1e-4, "minmax"), (1e-5, 1.0, "moving_average")),
    *((1e-5, 1e-4, "histogram"), (1e5, 1.0, "histogram")),
}
"""Each observer and each scale once: an observer knows nothing of the weights' scale."""


@pytest.mark.parametrize(
    ("inputs", "weights", "observer"),
    [
        pytest.param(*scales, o, marks=[pytest.mark.soak] * ((*scales, o) not in RANGES_IN_CI))
        for scales in SCALES
        for o in OBSERVERS
    ],
)
def test_small_and_large_ranges_keep_their_8_bits(
    tmp_path: Path, observer: str, inputs: float, weights: float
) -> None:
    model = scaled(tmp_path / "source", weights, bias=0)
    context = Context(root=tmp_path / "int8", data=scaled_rows(inputs))
    stage = QuantizeStatic.model_validate({"observer": observer, "calibration_samples": 64})
    error = Parity(atol=0).measure(model, stage(model, context), context)
    assert error < 0.03 * inputs * weights


def test_a_bias_far_above_its_products_is_kept(tmp_path: Path) -> None:
    model = scaled(tmp_path / "source", 1e-6, bias=5)
    context = Context(root=tmp_path / "int8", data=scaled_rows(1e-3))
    with QuantizeStatic(calibration_samples=64)(model, context).open() as predict:
        answers = predict(torch.randn(8, 4) * 1e-3)[0]
    assert answers[:, 0].tolist() == pytest.approx([5] * 8, rel=1e-6)
    assert 1e-10 < float(answers[:, 1].abs().max()) < 1e-8  # other units keep their steps


def test_a_range_that_vanishes_is_refused(tmp_path: Path) -> None:
    model = scaled(tmp_path / "source", 1, bias=0)
    context = Context(root=tmp_path / "none", data=scaled_rows(1e-25))
    with pytest.raises(StageFailed, match=r"at most, too small for .* nothing else is left"):
        QuantizeStatic(calibration_samples=64)(model, context)


@pytest.mark.slow
def test_a_layer_whose_input_vanishes_stays_float(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_model(tmp_path / "source", "networks:vanishing", ROWS)
    context = Context(root=tmp_path / "int8", data=splits((4,)))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    facts = graph.manifest.facts
    assert facts["quantized_operators"] == {"linear": 2}
    assert facts["float_modules"] == ["2"]
    assert max(facts["vanishing_ranges"].values()) < 1e-18
    assert "['2'] stay float" in caplog.text
    assert Parity(atol=0).measure(model, graph, context) < 0.03
    onnx = ExportOnnx()(graph, Context(root=tmp_path / "onnx", data=context.data))
    assert Parity(atol=0).measure(graph, onnx, context) < 1e-5


def test_only_operators_that_fuse_are_annotated(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:branches")
    context = Context(root=tmp_path / "int8", data=splits((1, 8, 8)))
    graph = QuantizeStatic(calibration_samples=64)(model, context)
    # The addition multiplies by alpha, which no integer kernel does.
    assert graph.manifest.facts["quantized_operators"] == {"conv2d": 2, "linear": 1}
    nodes = {n.name: n for n in graph.program().graph.nodes}
    for name in ("conv2d", "conv2d_1"):  # the first has two readers, so its relu is not fused
        assert all("quantize_per_tensor" in str(r.target) for r in nodes[name].users)
    pool = nodes["max_pool2d"]
    (after,) = pool.users
    assert pool.args[0].args[1:3] == after.args[1:3], "a move keeps the scale and zero point"


def test_scores_that_floats_alone_read_are_not_rounded(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:probabilities", ROWS)
    graph = QuantizeStatic(calibration_samples=32)(
        model, Context(root=tmp_path / "int8", data=splits((4,)))
    )
    nodes = list(graph.program().graph.nodes)
    linears = [n for n in nodes if n.target is torch.ops.aten.linear.default]
    rounded = ["quantize_per_tensor" in str(r.target) for n in linears for r in n.users]
    assert rounded == [False, False]  # the first is read by a relu, whose output is
    assert sum("quantize_per_tensor" in str(n.target) for n in nodes) == 2 * 2


@pytest.mark.parametrize("factory", ["networks:own_module", "networks:own_module_flat"])
def test_a_users_submodule_may_be_called_module(tmp_path: Path, factory: str) -> None:
    model = build_model(tmp_path / "source", factory, ROWS)
    stage = QuantizeStatic(calibration_samples=32, exclude=("module",))
    graph = stage(model, Context(root=tmp_path / "int8", data=splits((4,))))
    assert graph.manifest.facts["quantized_operators"] == {"linear": 1}
    assert graph.manifest.facts["float_modules"] == ["module.0"]


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (((3,),), r"float32 \[32, 3\]"),
        (((4, 1),), r"float32 \[32, 4, 1\]"),
        (((4,), (4,)), r"float32 \[32, 4\] and float32 \[32, 4\]"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_shape(
    tmp_path: Path, shapes: tuple[tuple[int, ...], ...], found: str
) -> None:
    model = build_model(tmp_path / "source", "networks:own_module", ROWS)
    with pytest.raises(StageFailed, match=rf"data is {found}, expected float32 \[batch, 4\]"):
        QuantizeStatic(calibration_samples=32)(
            model, Context(root=tmp_path / "none", data=splits(*shapes))
        )


@pytest.mark.slow
def test_too_few_samples_are_refused(resnet: tuple[EagerModel, Context], tmp_path: Path) -> None:
    model, context = resnet
    with pytest.raises(PipelineInvalid, match="calibration_samples: 5000 samples asked for"):
        QuantizeStatic(calibration_samples=5000)(model, context.with_root(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_no_data_is_refused(resnet: tuple[EagerModel, Context], tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="quantize_static needs data"):
        QuantizeStatic()(resnet[0], Context(root=tmp_path / "none"))


def test_nothing_to_quantize_is_refused(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:unquantizable", ROWS)
    with pytest.raises(StageFailed, match="no operator could be quantized"):
        QuantizeStatic(calibration_samples=16)(
            model, Context(root=tmp_path / "none", data=splits((4,)))
        )


def test_activations_that_are_not_finite_are_refused_by_place(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:diverging", ROWS)
    context = Context(root=tmp_path / "none", data=splits((4,)))
    with pytest.raises(StageFailed, match=r"calibration: div of .* is NaN or infinite"):
        QuantizeStatic(calibration_samples=16)(model, context)


def test_inputs_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp")
    data = Splits({"train": TensorDataset(torch.full((16, 1, 8, 8), float("nan")))})
    with pytest.raises(StageFailed, match="input image is NaN or infinite"):
        QuantizeStatic(calibration_samples=16, observer="histogram")(
            model, Context(root=tmp_path / "none", data=data)
        )


def test_a_refusing_gate_keeps_the_artifact(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:mlp")
    context = Context(root=tmp_path / "kept", data=splits((1, 8, 8)))
    stage = QuantizeStatic(calibration_samples=64, gates=(Parity(atol=0),))
    with pytest.raises(GateRefused, match=r"max \|difference\| <= 0"):
        stage(model, context)
    Artifact.from_directory(tmp_path / "kept").verify()


def test_progress_counts_samples(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def progress(task: str, done: int, total: int, note: str = "") -> None:
        seen.append((task, done, total))

    model = build_model(tmp_path / "source", "networks:mlp")
    data = splits((1, 8, 8), samples=80)
    QuantizeStatic(calibration_samples=80)(
        model, Context(root=tmp_path / "int8", data=data, progress=progress)
    )
    assert seen[:3] == [("calibrate", done, 80) for done in (32, 64, 80)]
    assert seen[-1] == ("compare with the float model", 80, 80)


def test_what_stays_float_of_pytorchs_decoder_is_named(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 6, 32)),))
    model = build_model(tmp_path / "source", "sequences:Decoder", signature)
    data = splits((6, 32))
    int8 = QuantizeStatic(calibration_samples=64)(model, Context(root=tmp_path / "int8", data=data))
    # Attention to the memory slices one packed weight for its queries, and for keys and values.
    facts = int8.manifest.facts
    assert facts["quantized_operators"]["linear"] == 2 + 2 * 5
    assert facts["float_modules"] == [f"decoder.layers.{i}.multihead_attn" for i in range(2)]
    x = torch.stack([row[0][0] for row in data.datasets["val"]])
    expected, found = answer(model, x), answer(int8, x)
    assert float((found - expected).std() / expected.std()) < 0.1


def test_settings_import_no_torch(fresh_process: Callable[[str], str]) -> None:
    code = "import compress.quantization.stages.static, sys; print('torch' in sys.modules)"
    assert fresh_process(code) == "False"
