"""Accuracy-aware mixed precision: the layers that ruin it are found, and no others."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import fx, nn
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import Parity
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.config.dtype_scheme import Target, scheme_for
from compress.quantization.mixed_precision.bit_search import BitSearch, CandidateBuilder
from compress.quantization.stages.mixed_precision import QuantizeMixed
from compress.quantization.stages.static import QuantizeStatic
from tests.compress.quantization.builders import IMAGE, build_model
from tests.compress.quantization.conftest import FreshProcessCheck

HERE = Path(__file__).parent
HALVES = ("decided_on", "confirmed_on")
ROWS = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 16)),), outputs=(OutputSpec(name="logits"),)
)
VANISHING = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="logits"),)
)


def deep() -> nn.Module:
    """Return seven layers of 16 units."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def ruined(*readers: str, number: float = 3e4) -> dict[str, torch.Tensor]:
    """Return weights whose readers are handed one large number, which they do not use."""
    torch.manual_seed(0)
    module = deep()
    with torch.no_grad():
        for layer in module:
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, 1.6)
        for name in readers:
            index = int(name)
            module[index - 2].weight[0] = 0
            module[index - 2].bias[0] = number
            module[index].weight[:, 0] = 0
    return module.state_dict()


def project(root: Path, *readers: str, **number: float) -> tuple[EagerModel, Context]:
    """Return a model, and data whose labels are those that it gives."""
    recipe = Recipe(factory="test_quantize_mixed:deep")
    state = ruined(*readers, **number)
    model = EagerModel.create(root / "source", recipe, state, ROWS, folder=HERE)
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    with model.open() as predict:
        labels = predict(x)[0].argmax(1)
    data = TensorDataset(x, labels)
    return model, Context(root / "mixed", Splits({"train": data, "val": data}, 64))


def two_convolutions() -> nn.Module:
    """Return a network of two convolutions for 8×8 images."""
    parts = [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*parts, nn.Linear(128, 4))


@pytest.mark.slow
def test_a_correction_is_tried_before_any_layer_stays_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = two_convolutions()
    with torch.no_grad():  # the same function, with two channels that fill the others' range
        module[0].weight[:2] *= 1000
        module[0].bias[:2] *= 1000
        module[2].weight[:, :2] /= 1000
    recipe = Recipe(factory="test_quantize_mixed:two_convolutions")
    model = EagerModel.create(tmp_path / "source", recipe, module.state_dict(), IMAGE, folder=HERE)
    images = torch.randn(256, 1, 8, 8)
    with model.open() as predict:
        data = TensorDataset(images, predict(images)[0].argmax(1))
    context = Context(tmp_path / "mixed", Splits({"train": data, "val": data}, 64))
    settings = {"max_drop_points": 3, "calibration_samples": 64}
    small = QuantizeMixed(**settings)(model, context)
    facts = small.manifest.facts
    assert facts["float_modules"] == []
    assert facts["equalized_pairs"] == 1
    found = facts["mixed"]
    assert found["corrections"].keys() == {"equalize"}
    halves = [drop_on(range(first, 256, 2), model, small, context) for first in range(2)]
    assert found["decided_on"]["drop_points"] == found["corrections"]["equalize"]
    assert [found[half]["drop_points"] for half in HALVES] == pytest.approx(halves, abs=1e-4)
    assert [found[half]["samples"] for half in HALVES] == [128, 128]
    assert found["drop_all_quantized_points"] > 3 >= halves[0]
    without = QuantizeMixed(**settings, corrections=())(model, context.with_root(tmp_path / "none"))
    assert without.manifest.facts["float_modules"]
    assert without.manifest.facts["mixed"]["corrections"] == {}


def drop_on(indices: range, model: EagerModel, graph: GraphModel, context: Context) -> float:
    """Return by how many points of accuracy a graph is worse on some samples of `val`."""
    images, labels = context.data.datasets["val"].tensors
    with model.open() as expected, graph.open() as predict:
        right = [f(images[indices])[0].argmax(1) == labels[indices] for f in (expected, predict)]
    return 100 * float(right[0].float().mean() - right[1].float().mean())


@pytest.mark.slow
def test_samples_that_the_search_does_not_see_tell_where_it_was_lucky(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, context = project(tmp_path, "4")
    rows, labels = context.data.datasets["val"].tensors
    with QuantizeStatic(calibration_samples=64)(
        model, context.with_root(tmp_path / "all")
    ).open() as predict:
        kept = predict(rows)[0].argmax(1) == labels
    # Of the samples at even places all are those that rounding leaves right, of the others none.
    count = min(int(kept.sum()), int((~kept).sum()))
    order = torch.stack([kept.nonzero()[:count, 0], (~kept).nonzero()[:count, 0]], 1).flatten()
    val = TensorDataset(rows[order], labels[order])
    data = Splits({"train": context.data.datasets["train"], "val": val}, 64)
    context = Context(tmp_path / "mixed", data)
    facts = QuantizeMixed(max_drop_points=5, calibration_samples=64)(model, context).manifest.facts
    found = facts["mixed"]
    assert found["decided_on"] == {"samples": count, "before": 1.0, "drop_points": 0.0}
    assert found["confirmed_on"] == {"samples": count, "before": 1.0, "drop_points": 100.0}
    assert facts["float_modules"] == []
    assert "loses 100 points of accuracy on the half of val that the search did not" in caplog.text


def test_one_sample_cannot_be_halved(tmp_path: Path) -> None:
    model, context = project(tmp_path)
    train = context.data.datasets["train"]
    data = Splits({"train": train, "val": TensorDataset(*train[:1])}, 64)
    with pytest.raises(StageFailed, match="quantize_mixed halves split 'val', which has one"):
        QuantizeMixed(max_drop_points=5)(model, Context(tmp_path / "one", data))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[EagerModel, Context, GraphModel]:
    """Return what the stage makes of a model with two layers that 8 bits ruin."""
    model, context = project(tmp_path_factory.mktemp("mixed"), "4", "10")
    stage = QuantizeMixed(max_drop_points=5, calibration_samples=256)
    return model, context, stage(model, context)


@pytest.mark.slow
def test_exactly_the_sensitive_layers_stay_float(
    mixed: tuple[EagerModel, Context, GraphModel],
) -> None:
    model, context, graph = mixed
    facts = graph.manifest.facts
    assert facts["float_modules"] == ["10", "4"]
    assert facts["quantized_operators"]["linear"] == 5
    found = facts["mixed"]
    assert found["drop_all_quantized_points"] > 20
    drops = [found[half]["drop_points"] for half in HALVES]
    drop = 100 * (context.score(model) - context.score(graph))
    assert sum(drops) / 2 == pytest.approx(drop, abs=1e-4)
    assert drops[0] <= 5
    formats = {layer["module"]: layer["format"] for layer in found["layers"]}
    assert {name for name, chosen in formats.items() if chosen == "float"} == {"4", "10"}
    assert [layer["module"] for layer in found["layers"]][:2] in (["4", "10"], ["10", "4"])
    assert sorted(layer["sensitivity"] for layer in found["layers"])[1] < 10
    assert sorted(layer["sensitivity"] for layer in found["layers"])[2] > 20


@pytest.mark.soak  # as the graph of test_quantize_static.py
@pytest.mark.slow
def test_a_rerun_gives_the_same_bytes(
    mixed: tuple[EagerModel, Context, GraphModel], tmp_path: Path
) -> None:
    model, context, graph = mixed
    stage = QuantizeMixed(max_drop_points=5, calibration_samples=256)
    assert stage(model, context.with_root(tmp_path / "again")).digest == graph.digest


@pytest.mark.soak  # as the graph of test_quantize_static.py
@pytest.mark.slow
def test_a_fresh_process_answers_alike(
    mixed: tuple[EagerModel, Context, GraphModel], assert_same_in_fresh_process: FreshProcessCheck
) -> None:
    assert_same_in_fresh_process(mixed[2], *ROWS.example(3))


@pytest.mark.parametrize(
    "target", ["onnxruntime-cpu", pytest.param("tensorrt", marks=pytest.mark.soak)]
)
def test_where_all_layers_may_be_quantized_they_are_as_by_quantize_static(
    tmp_path: Path, target: Target
) -> None:
    model, context = project(tmp_path)
    graph = QuantizeMixed(max_drop_points=10, calibration_samples=64, target=target)(model, context)
    found = graph.manifest.facts["mixed"]
    assert found["evaluations"] == 1
    assert {layer["format"] for layer in found["layers"]} == {"minmax"}
    stage = QuantizeStatic(calibration_samples=64, target=target)
    same = stage(model, context.with_root(tmp_path / "static"))
    with graph.open() as a, same.open() as b:
        assert torch.equal(a(*ROWS.example(9))[0], b(*ROWS.example(9))[0])


@pytest.mark.slow
def test_the_metric_can_rank_and_excluded_layers_are_left_alone(tmp_path: Path) -> None:
    model, context = project(tmp_path, "4")
    stage = QuantizeMixed(
        max_drop_points=5,
        calibration_samples=64,
        sensitivity="metric",
        fallback=("float",),
        cost="latency",
        exclude=("12",),
    )
    facts = stage(model, context).manifest.facts
    assert facts["float_modules"] == ["12", "4"]
    first = facts["mixed"]["layers"][0]
    assert (first["module"], first["format"]) == ("4", "float")
    assert first["sensitivity"] > 10
    assert sum(layer["cost"] for layer in facts["mixed"]["layers"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_layers_for_which_sixteen_bits_are_enough_get_them(tmp_path: Path) -> None:
    model, context = project(tmp_path, "4", "10", number=500.0)
    stage = QuantizeMixed(max_drop_points=5, calibration_samples=256, fallback=("uint16", "float"))
    graph = stage(model, context)
    facts = graph.manifest.facts
    formats = {layer["module"]: layer["format"] for layer in facts["mixed"]["layers"]}
    assert {name for name, chosen in formats.items() if chosen == "uint16"} == {"4", "10"}
    assert set(formats.values()) == {"uint16", "minmax"}
    assert facts["float_modules"] == []
    assert facts["quantized_operators"]["linear"] == 7
    assert facts["mixed"]["drop_all_quantized_points"] > 25
    assert facts["mixed"]["decided_on"]["drop_points"] <= 5
    exported = ExportOnnx(gates=(Parity(atol=1e-3),))(graph, context.with_root(tmp_path / "onnx"))
    assert exported.manifest.facts["opset"] == 21
    # onnxruntime has no kernel that reads or gives 16 bits, so those before them are floats too.
    assert exported.manifest.facts["integer_kernels"] == {"QGemm": 3}
    assert exported.manifest.facts["float_kernels"] == {"Gemm": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fallback": ("histogram",)},
            r"points of accuracy with 0 of 7 layers in float; add `float`",
        ),
        ({"minutes": 1e-9}, r"best of 1 candidates loses .*; the time was over, raise `minutes`"),
    ],
)
def test_a_limit_that_cannot_be_met_is_refused_with_the_best_candidate(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    model, context = project(tmp_path, "4")
    stage = QuantizeMixed.model_validate(
        {"max_drop_points": 0, "calibration_samples": 64, **settings}
    )
    with pytest.raises(StageFailed, match=rf"^max_drop_points 0 is not met: .*{message}"):
        stage(model, context)
    assert not context.root.exists()


def test_the_limit_of_older_files_is_refused_with_what_to_write() -> None:
    with pytest.raises(ValidationError, match=r"write max_drop_points: 0\.5 for the same limit"):
        QuantizeMixed.model_validate({"max_drop": 0.005})


def test_a_fallback_that_is_the_observer_is_refused() -> None:
    with pytest.raises(ValidationError, match="'histogram' is the observer of all layers already"):
        QuantizeMixed(max_drop_points=0, observer="histogram")


def test_sixteen_bits_are_refused_for_targets_without_kernels() -> None:
    with pytest.raises(ValidationError, match="'uint16' is for target: onnxruntime-cpu, found"):
        QuantizeMixed(max_drop_points=0, fallback=("uint16",), target="tensorrt")
    assert QuantizeMixed(max_drop_points=0).activation_formats == {"uint8"}
    stage = QuantizeMixed(max_drop_points=0, fallback=("uint16", "float"))
    assert stage.activation_formats == {"uint8", "uint16"}


class Known:
    """A meter of candidates that are given as their formats: sums the loss of quantized layers."""

    metric = "accuracy"

    def __init__(self, lost: dict[str, float], wide: dict[str, float]) -> None:
        self.lost, self.wide = lost, wide

    def metric_drop(self, formats: dict[str, str]) -> float:
        given = {name: formats.get(name) for name in self.lost}
        return sum(
            self.wide.get(name, 0.0) if given[name] == "uint16" else lost
            for name, lost in self.lost.items()
            if given[name] != "float"
        )


def searched(
    lost: dict[str, float],
    max_drop_points: float,
    order: list[str],
    fallback: tuple[str, ...] = ("float",),
    wide: dict[str, float] | None = None,
) -> BitSearch:
    """Return a search over layers whose losses are known and whose ranking is given.

    Args:
        lost: what each layer loses in 8 bits.
        max_drop_points: what they may lose together.
        order: the ranking.
        fallback: formats that layers may be given.
        wide: what each layer loses in 16 bits; others lose nothing.
    """
    graph = fx.GraphModule({}, fx.Graph())
    candidates = CandidateBuilder(graph, ROWS, scheme_for("onnxruntime-cpu"), (), {"minmax": {}})
    candidates.layers = list(lost)
    candidates.build = lambda formats: (formats, None)
    costs = dict.fromkeys(lost, 1 / len(lost))
    meter = Known(lost, wide or {})
    search = BitSearch(candidates, None, meter, max_drop_points, fallback, costs, float("inf"))
    search._rank_layers = lambda: None
    search._order = lambda: order
    return search


def test_the_smallest_prefix_is_found_and_reduced_to_the_layers_that_need_it() -> None:
    lost = {"a": 0.5, "b": 0.0, "c": 0.4, "d": 0.3, "e": 0.01, "f": 0.01, "g": 0.0}
    search = searched(lost, 0.02, ["a", "b", "c", "d", "e", "f", "g"])
    assert search.run() == {"a": "float", "c": "float", "d": "float"}
    assert search.evaluations < 2 ** len(lost) / 8


def test_a_sensitive_layer_is_found_though_its_cost_ranks_it_last() -> None:
    search = searched({"a": 0.0, "b": 0.0, "c": 0.0, "dear": 0.5}, 0.1, ["a", "b", "c", "dear"])
    assert search.run() == {"dear": "float"}


def test_fewer_float_layers_are_tried_where_more_are_worse() -> None:
    lost = dict.fromkeys("abcdefgh", 0.0)
    search = searched(lost, 0.1, [*lost])
    search.meter.metric_drop = lambda formats: (
        0.0 if set(formats) >= {"c"} and len(formats) < 4 else 0.5
    )
    assert search.run() == {"c": "float"}


def test_layers_stay_float_where_sixteen_bits_are_not_enough() -> None:
    lost = {"a": 0.5, "b": 0.0, "c": 0.4, "d": 0.3}
    search = searched(lost, 0.02, ["a", "c", "d", "b"], ("uint16", "float"), {"c": 0.4})
    assert search.run() == {"a": "uint16", "c": "float", "d": "uint16"}


@pytest.mark.parametrize("fallback", [("uint16",), ("uint16", "float")])
def test_all_layers_may_read_sixteen_bits(fallback: tuple[str, ...]) -> None:
    lost = {"a": 0.5, "b": 0.5, "c": 0.4}
    assert searched(lost, 0.0, [*lost], fallback).run() == dict.fromkeys(lost, "uint16")


def test_the_message_says_when_no_choice_keeps_the_metric() -> None:
    search = searched({"a": 0.5, "b": 0.5, "c": 0.4}, 0.0, ["a", "b", "c"])
    with pytest.raises(
        StageFailed, match=r"loses 0\.4 points of accuracy with 2 of 3 layers in float; no"
    ):
        search.run()


def test_an_addition_in_float_does_not_keep_the_next_one_in_float(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
    recipe = Recipe(factory="networks:two_additions")
    torch.manual_seed(0)
    state = recipe.build(HERE).state_dict()
    model = EagerModel.create(tmp_path / "source", recipe, state, signature, folder=HERE)
    x = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    context = Context(tmp_path / "int8", Splits({"train": TensorDataset(x, x[:, 0, 0, 0])}))
    graph = QuantizeStatic(calibration_samples=32, exclude=("first",))(model, context)
    assert graph.manifest.facts["quantized_operators"] == {"add": 1, "conv2d": 2}


def test_layers_whose_ranges_vanish_stay_float(tmp_path: Path) -> None:
    model = build_model(tmp_path / "source", "networks:vanishing", VANISHING)
    rows = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
    context = Context(root=tmp_path / "mixed", data=Splits({"train": rows, "val": rows}))
    stage = QuantizeMixed(max_drop_points=100, calibration_samples=64)
    facts = stage(model, context).manifest.facts
    assert facts["quantized_operators"] == {"linear": 2}
    assert facts["float_modules"] == ["2"]
    assert [layer["module"] for layer in facts["mixed"]["layers"]] == ["0", "4"]
    assert max(facts["vanishing_ranges"].values()) < 1e-18
