from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import LabelAgreement
from compress.core.metrics import Metric
from compress.core.objectives.task import task_named
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx
from compress.quantization.qat.fake_model import compare_labels, compare_with_trained
from compress.quantization.stages.qat import QuantizeAwareTraining
from compress.quantization.stages.static import QuantizeStatic
from compress.training.stage import Train

HERE = Path(__file__).parent
IMAGE = Signature(
    inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),),
    outputs=(OutputSpec(name="logits"),),
)


def build(path: Path, factory: str, signature: Signature = IMAGE) -> EagerModel:
    recipe = Recipe(factory=f"networks:{factory}")
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=HERE)


@pytest.fixture(scope="module")
def few(digits: Splits) -> Splits:
    """A few of the digits, so that an epoch is short."""
    train, val = digits.split("train"), digits.split("val")
    return Splits(
        {"train": TensorDataset(*train[:192]), "val": TensorDataset(*val[:64])}, batch_size=64
    )


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory, few: Splits) -> EagerModel:
    """A small network that knows the digits somewhat."""
    folder = tmp_path_factory.mktemp("mlp")
    source = build(folder / "source", "mlp")
    return Train(epochs=4)(source, Context(root=folder / "trained", data=few))


def stage(**settings: Any) -> QuantizeAwareTraining:
    return QuantizeAwareTraining.model_validate(
        {"epochs": 2, "calibration_samples": 64, "weight_bits": 4, **settings}
    )


@pytest.fixture(scope="module")
def trained(mlp: EagerModel, few: Splits, tmp_path_factory: pytest.TempPathFactory) -> GraphModel:
    return stage()(mlp, Context(root=tmp_path_factory.mktemp("qat") / "int4", data=few))


def test_the_integer_graph_gives_the_trained_models_labels(
    trained: GraphModel, few: Splits
) -> None:
    facts = trained.manifest.facts
    assert facts["quantized_operators"] == {"linear": 3}
    assert [epoch["epoch"] for epoch in facts["history"]] == [0, 1, 2]
    same = facts["same_as_trained"]
    assert (same["labels"], same["differing"], same["near_ties"]) == (64, 0, 0)
    assert 0 < same["last_step"] < 1
    kept = facts["history"][facts["kept_epoch"]]["metric"]
    assert Context(root=Path("unused"), data=few).score(trained) == kept


def test_weights_have_the_asked_number_of_bits(trained: GraphModel) -> None:
    integers = [t for t in trained.program().state_dict.values() if t.dtype == torch.int8]
    integers += [t for t in trained.program().constants.values() if t.dtype == torch.int8]
    assert len(integers) == 3
    assert all(int(t.min()) >= -7 and int(t.max()) <= 7 for t in integers)


@pytest.mark.slow
def test_training_begins_with_what_calibration_alone_gives(
    mlp: EagerModel, few: Splits, tmp_path: Path
) -> None:
    context = Context(root=tmp_path / "qat", data=few)
    harmful = {"weight_bits": 8, "epochs": 1, "learning_rate": 1e6, "on_nan": "skip"}
    kept = stage(**harmful)(mlp, context)
    assert kept.manifest.facts["kept_epoch"] == 0
    static = QuantizeStatic(calibration_samples=64)(mlp, context.with_root(tmp_path / "static"))
    with kept.open() as found, static.open() as expected:
        for batch in few.batches("val"):
            torch.testing.assert_close(found(*batch.inputs)[0], expected(*batch.inputs)[0])


def stopped_after(context: Context, epoch: int) -> Context:
    def progress(task: str, done: int, total: int, note: str = "") -> None:
        if task == "quantize_aware_training" and done == epoch and "resumed" not in note:
            raise KeyboardInterrupt

    return replace(context, progress=progress)


@pytest.mark.slow
def test_an_interrupted_training_ends_bit_identical(
    mlp: EagerModel, few: Splits, tmp_path: Path
) -> None:
    learning = stage(keep="last")  # ranges are frozen after the first epoch
    whole = learning(mlp, Context(root=tmp_path / "whole", data=few))
    parts = Context(root=tmp_path / "parts", data=few)
    with pytest.raises(KeyboardInterrupt):
        learning(mlp, stopped_after(parts, 1))
    notes = []
    resumed = replace(parts, progress=lambda task, done, total, note="": notes.append(note))
    assert learning(mlp, resumed).digest == whole.digest
    assert "resumed after epoch 1" in notes


def test_samples_without_labels_are_learnt_from_the_float_model(
    mlp: EagerModel, few: Splits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = few.split("train").tensors[0]  # type: ignore[attr-defined]
    bare = {"train": TensorDataset(images), "val": TensorDataset(images[:64])}
    context = Context(
        root=tmp_path / "qat",
        data=Splits(bare, batch_size=64),
        metric=Metric("fidelity"),
        artifacts={"source": mlp},
    )
    with caplog.at_level("INFO"):
        graph = stage(epochs=1)(mlp, context)
    assert "the float model's outputs are the targets" in caplog.text
    assert graph.manifest.facts["history"][1]["loss"] < 0.2


@pytest.mark.slow
def test_the_graph_has_the_learned_steps_and_folded_batch_norms(
    few: Splits, tmp_path: Path
) -> None:
    source = build(tmp_path / "source", "mobilenet")
    settings = {"learn_steps": True, "keep": "last", "teaching": {"loss": "mse"}, "epochs": 1}
    context = Context(root=tmp_path / "qat", data=few)
    same = stage(**settings, exclude=["stem"])(source, context).manifest.facts["same_as_trained"]
    assert same["differing"] == 0
    assert same["largest_difference"] < 1e-5


@pytest.mark.slow
def test_embeddings_and_symmetric_targets_are_trained_too(tmp_path: Path) -> None:
    tokens = TensorSpec(name="tokens", shape=("batch", "length"), dtype="int64")
    source = build(tmp_path / "source", "sequence", Signature(inputs=(tokens,)))
    data = Splits({"train": TensorDataset(torch.randint(0, 50, (64, 8)))}, batch_size=32)
    settings = {"epochs": 1, "keep": "last", "teaching": {"loss": "mse"}, "target": "tensorrt"}
    context = Context(root=tmp_path / "qat", data=data)
    facts = stage(**settings, weight_bits=8)(source, context).manifest.facts
    assert facts["quantized_operators"]["embedding"] == 1
    assert facts["same_as_trained"]["differing"] == 0
    assert facts["same_as_trained"]["largest_difference"] < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("learn_steps", [False, True])
def test_a_model_trained_on_cuda_converts_to_the_same_labels(
    few: Splits, tmp_path: Path, learn_steps: bool
) -> None:
    source = build(tmp_path / "source", "mobilenet")
    context = Context(root=tmp_path / "qat", data=few, device="cuda:0")
    graph = stage(learn_steps=learn_steps, keep="last")(source, context)
    assert graph.manifest.facts["same_as_trained"]["differing"] == 0


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_two_processes_train_what_one_does(mlp: EagerModel, few: Splits, tmp_path: Path) -> None:
    # Ranges that stay: those that follow see the share of one process.
    settings = {"freeze_observers": 0.0, "keep": "last", "epochs": 1}
    one, two = (
        stage(**settings, parallel={"processes": n})(mlp, Context(root=tmp_path / f"{n}", data=few))
        for n in (1, 2)
    )
    losses = [graph.manifest.facts["history"][1]["loss"] for graph in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert two.manifest.facts["same_as_trained"]["differing"] == 0
    assert LabelAgreement().measure(one, two, Context(root=tmp_path / "x", data=few)).value >= 0.98


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learn_steps": True, "freeze_observers": 0.3}, "leave one out"),
        ({"parallel": {"strategy": "fsdp", "processes": 2}}, "found strategy: fsdp"),
        ({"parallel": {"strategy": "dp"}}, "found strategy: dp"),
        ({"compile": "whole"}, "found compile: whole"),
        ({"weight_bits": 3}, "4, 7 or 8"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        stage(**settings)


def test_an_exclude_that_names_nothing_is_refused(mlp: EagerModel, few: Splits) -> None:
    with pytest.raises(PipelineInvalid, match="no module is named 'heat'"):
        stage(exclude=["heat"])(mlp, Context(root=Path("unused"), data=few))


def test_a_model_of_one_batch_size_is_refused(few: Splits, tmp_path: Path) -> None:
    fixed = Signature(inputs=(TensorSpec(name="image", shape=(4, 1, 8, 8)),))
    source = build(tmp_path / "source", "mlp", fixed)
    with pytest.raises(StageFailed, match="batches of one size only"):
        stage()(source, Context(root=tmp_path / "qat", data=few))


def test_a_graph_that_is_another_model_is_refused() -> None:
    trained = torch.eye(4).repeat(100, 1)
    trained[:3, 3] = 0.7
    integer = trained.clone()
    integer[:3, 3] = 1.1
    ties = compare_labels(trained, integer, step=0.4)
    assert (ties.differing, ties.near_ties) == (3, 3)
    ties.require_same_model()
    assert ties.line() == (
        "397 of 400 labels as trained; near-ties (margins below the last quantization step, 0.4): "
        "3 of 3"
    )
    other = compare_labels(trained, trained.roll(1, 1), step=0.2)
    assert (other.differing, other.near_ties) == (400, 0)
    with pytest.raises(StageFailed, match="400 of 400 labels otherwise"):
        other.require_same_model()


@pytest.mark.parametrize(
    ("task", "labels"),
    [(None, 2 * 4), ("token-classification", 2 * 5), ("classification", 2 * 4), ("regression", 0)],
)
def test_labels_are_those_of_the_tasks_class_axis(task: str | None, labels: int) -> None:
    scores = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    parity = compare_with_trained(
        torch.nn.Identity(), lambda x: (x,), [(scores,)], step=None, task=task_named(task)
    )
    assert (0 if parity is None else parity.labels) == labels


# A figure; what the training learns is in the tests below and above.
@pytest.mark.soak
@pytest.mark.slow
def test_four_bits_that_are_trained_for_beat_those_that_are_not(
    digits: Splits, tmp_path: Path
) -> None:
    context = Context(root=tmp_path / "float", data=digits)
    model = Train(epochs=12)(build(tmp_path / "source", "mobilenet"), context)
    graph = stage(epochs=3, calibration_samples=256)(model, context.with_root(tmp_path / "qat"))
    history = graph.manifest.facts["history"]
    calibrated, kept = history[0]["metric"], history[graph.manifest.facts["kept_epoch"]]["metric"]
    assert calibrated < context.score(model) - 0.01
    assert kept >= calibrated + 0.01
    onnx = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    assert LabelAgreement().measure(graph, onnx, context).value >= 0.995


@pytest.mark.slow
def test_a_layer_whose_input_vanishes_stays_float(tmp_path: Path) -> None:
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="logits"),)
    )
    model = build(tmp_path / "source", "vanishing", signature)
    rows = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
    context = Context(root=tmp_path / "int8", data=Splits({"train": rows, "val": rows}))
    facts = stage(epochs=1, weight_bits=8)(model, context).manifest.facts
    assert facts["quantized_operators"] == {"linear": 2}
    assert facts["float_modules"] == ["2"]
