"""The loss of a pipeline, from the file to the deployed model: what a user brings, and gets."""

from pathlib import Path

import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.common.errors import PipelineInvalid
from compress.data.splits import DataReference
from compress.pipelines import Pipeline
from compress.pipelines.commands.check import check_pipeline
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import Project

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 12, batch_first=True), nn.Linear(12, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])

def mlp(outputs=1, hidden=16):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

def log_probabilities():
    return nn.Sequential(mlp(3), nn.LogSoftmax(1))

def probabilities():
    return nn.Sequential(mlp(3), nn.Softmax(1))

def shares():
    return nn.Sequential(mlp(1), nn.Sigmoid())

def pixels():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

def split(x, y):
    return {n: TensorDataset(x[a:b], y[a:b]) for n, a, b in
            (("train", 0, 320), ("val", 320, 400), ("test", 400, 480))}

def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

def series():
    x = drawn(480, 5, 2)
    return split(x, x[:, -1:, 0] * 2 + x.mean((1, 2))[:, None] + 3)

def numbers(outputs=1):
    x = drawn(480, 4)
    return split(x, (x @ torch.linspace(-1, 2, 4 * outputs).view(4, outputs)) + 1)

def binary(column=True, whole=False):
    x = drawn(480, 4)
    y = x[:, :1] + x[:, 1:2] > 0
    return split(x, (y.long() if whole else y.float())[:, 0 if not column else slice(None)])

def classes(labels=3):
    x = drawn(480, 4)
    return split(x, x[:, :3].argmax(1) % labels if labels < 3 else x[:, :labels].argmax(1))

def masks():
    x = drawn(480, 1, 6, 6)
    return split(x, (x[:, 0] > 0).to(torch.uint8))

def dictionaries():
    x = drawn(40, 4)
    rows = [(row, {"boxes": row, "classes": row.argmax()}) for row in x]
    return {"train": rows, "val": rows}

def huber(outputs, targets):
    return nn.functional.huber_loss(outputs, targets)

def nothing(outputs, targets):
    return outputs.sum() * 0
"""

TRAIN = "{stage: train, epochs: 6, batch_size: 32, optimizer: adamw, learning_rate: 0.02}"


def project(folder: Path, model: str, data: str, task: str = "", stages: str = TRAIN) -> Project:
    (folder / "nets.py").write_text(NETS)
    (folder / "small.yaml").write_text(
        f'version: 1\nmodel: {{factory: "nets:{model}"}}\n'
        f"data: {{factory: nets:{data}}}\n{task}\nstages:\n  - {stages}\n"
    )
    return Project(folder)


def announced(found: Project) -> list[str]:
    return [line for line in found.said if line.startswith("loss: ")]


def answers(found: Project, name: str, data: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the artifact of a stage answers to `test`, and what is right."""
    (batch,) = DataReference(f"nets:{data}", {}, found.folder, 80).load().batches("test")
    with Artifact.from_directory(found.out / "artifacts" / name).open() as predict:
        return predict(*batch.inputs)[0], batch.target


@pytest.mark.soak
def test_an_lstm_learns_numbers_and_the_exported_file_predicts_them(tmp_path) -> None:
    longer = TRAIN.replace("epochs: 6", "epochs: 12").replace("0.02", "0.05")
    stages = f"{longer}\n  - {{stage: export_onnx, gates: [{{gate: parity, atol: 1e-4}}]}}"
    found = project(tmp_path, "LSTM", "series", stages=stages)
    report = found.run()
    assert announced(found) == [
        "loss: mse, as targets are float32 [n, 1] and outputs float32 [n, 1]; metric: mse"
    ]
    untrained, trained = (
        float((y - right).square().mean())
        for y, right in (answers(found, name, "series") for name in ("source", "export_onnx"))
    )
    assert trained < 0.1 * untrained
    assert report.test.values["export_onnx"] == pytest.approx(trained, rel=1e-4)
    assert report.warnings == ()
    again = found.run()
    assert all(stage.cached for stage in again.stages)


@pytest.mark.parametrize(
    ("model", "data", "task", "said"),
    [
        ("mlp", "binary", "", "loss: binary_cross_entropy, as targets are float32 [n, 1]"),
        (
            "mlp",
            "binary, arguments: {column: false}",
            "",
            "loss: binary_cross_entropy, as targets are float32 [n]",
        ),
        (
            "mlp",
            "binary, arguments: {column: false, whole: true}",
            "loss: binary_cross_entropy",
            None,
        ),
        ("log_probabilities", "classes", "loss: nll", None),
        ("pixels", "masks", "", "loss: cross_entropy, as targets are uint8 [n, 6, 6]"),
    ],
)
def test_a_model_of_classes_becomes_right(tmp_path, model, data, task, said) -> None:
    found = project(tmp_path, model, data, task)
    report = found.run()
    assert [line[: len(said or "")] for line in announced(found)] == ([said] if said else [])
    (metric,) = (stage.measurements.metric for stage in report.stages)
    assert metric.name == "accuracy"
    assert metric.value > 0.9


@pytest.mark.parametrize(
    "loss",
    # The names go the way of a user's function, which a name is too by then.
    ["nets:huber", *(pytest.param(n, marks=pytest.mark.soak) for n in ("mse", "l1", "smooth_l1"))],
)
def test_every_stage_that_trains_follows_the_loss(tmp_path, loss) -> None:
    tuned = "finetune: {epochs: 2, batch_size: 32, optimizer: adamw, learning_rate: 0.005}"
    stages = f"{TRAIN}\n  - {{stage: prune_channels, ratio: 0.5, importance: taylor, {tuned}}}"
    found = project(tmp_path, "mlp", "numbers", f"loss: {loss}\nmetric: r2", stages)
    report = found.run()
    assert announced(found) == []
    trained, pruned = (stage.measurements.metric.value for stage in report.stages)
    assert trained > 0.9
    assert pruned > 0.8


@pytest.mark.slow
def test_quantization_aware_training_and_distillation_follow_it_too(tmp_path) -> None:
    more = "epochs: 2, batch_size: 32, optimizer: adamw"
    stages = (
        f"{TRAIN}\n  - {{stage: distill, teacher: train, input: source, losses: "
        f"[{{loss: mse, weight: 0.5}}, {{loss: labels}}], {more}, learning_rate: 0.02}}"
        f"\n  - {{stage: quantize_aware_training, input: train, {more}, calibration_samples: 32}}"
    )
    found = project(tmp_path, "mlp", "numbers", "metric: r2", stages)
    values = {s.name: s.measurements.metric.value for s in found.run().stages}
    assert values["distill"] > 0.5
    assert values["quantize_aware_training"] > 0.9


@pytest.mark.slow
def test_a_loss_that_does_not_depend_on_the_outputs_is_warned_of(tmp_path) -> None:
    found = project(tmp_path, "mlp", "numbers", "loss: nets:nothing")
    found.run()
    useless, warning = Report.read(found.out).warnings
    assert useless.startswith("train: loss is no better than that of one and the same answer")
    assert warning.startswith("train: the training loss was 0 in every step of epoch 1, 2, 3, 4")
    assert all(stage.cached for stage in found.run().stages)
    assert Report.read(found.out).warnings == (useless, warning)


@pytest.mark.slow
def test_another_loss_and_other_code_of_it_train_anew(tmp_path) -> None:
    found = project(tmp_path, "mlp", "numbers", "loss: nets:huber")
    found.run()
    found.edit("nets:huber", "mse")
    found.run()
    assert list(found.ran()) == ["train"]
    assert found.ran()["train"].startswith("loss.")
    found.edit("loss: mse", "loss: own:half")
    own = found.folder / "own.py"
    own.write_text("def half(y, t):\n    return (y - t).square().mean() / 2\n")
    found.run()
    own.write_text("def half(y, t):\n    return (y - t).square().mean() / 3\n")
    found.run()
    assert list(found.ran()) == ["train"]


@pytest.mark.parametrize(
    ("data", "task", "stages", "reason"),
    [
        ("numbers", "loss: cross_entropy", TRAIN, r":4: loss: .* for numbers use mse, l1"),
        (
            "numbers",
            "metric: accuracy",
            TRAIN,
            r":4: metric: .*use metric: mse \(task: regression, as targets",
        ),
        ("classes", "loss: mse", TRAIN, r":4: loss: mse takes targets that are numbers"),
        (
            "classes",
            "",
            TRAIN,
            r":3: data: .*label 2 is out of range: the model answers yes or no, 0 or 1 ",
        ),
        ("numbers", "loss: mes", TRAIN, r":4: loss: unknown loss 'mes'; did you mean 'mse'"),
        ("numbers", "loss: nets:gone", TRAIN, r":4: loss: .* no callable 'gone'"),
        (
            "numbers",
            "loss: mse",
            TRAIN.replace("}", ", label_smoothing: 0.1}"),
            r":6: stages\[0\] \(train\): label_smoothing is for loss: cross_entropy, found mse",
        ),
        (
            "numbers",
            "",
            TRAIN.replace("}", ", class_weights: [1, 2]}"),
            r":6: stages\[0\] \(train\): class_weights is for loss: cross_entropy or nll",
        ),
        (
            "numbers",
            "",
            TRAIN.replace("}", ", gates: [{gate: min_metric, at: 0.5}]}"),
            r"gates\[0\] \(min_metric\): metric mse falls with quality",
        ),
        (
            "numbers",
            "",
            "{stage: distill, teacher: source, epochs: 1}",
            r"loss: kl compares probabilities of classes .* with loss: mse has none",
        ),
        (
            "dictionaries",
            "",
            TRAIN,
            r":3: data: no loss follows from targets that are a list of \[\{boxes: float32 \[4\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_trained(
    tmp_path, data, task, stages, reason
) -> None:
    found = project(tmp_path, "mlp", data, task, stages)
    with pytest.raises(PipelineInvalid, match=reason):
        check_pipeline(found.file, models=True)
    with pytest.raises(PipelineInvalid, match=reason):
        found.run()
    assert "train" not in found.ran()


def test_a_label_out_of_range_is_refused_before_anything_is_trained(tmp_path) -> None:
    found = project(tmp_path, "log_probabilities", "classes, arguments: {labels: 4}")
    with pytest.raises(PipelineInvalid, match="label 3 is out of range: the model has 3 classes"):
        check_pipeline(found.file, models=True)


@pytest.mark.parametrize(
    ("model", "data", "mend"),
    [
        ("probabilities", "classes", "leave out the softmax, or use log_softmax and loss: nll"),
        ("shares", "binary", "leave out the sigmoid"),
    ],
)
def test_outputs_that_are_probabilities_already_are_warned_of(tmp_path, model, data, mend) -> None:
    found = project(tmp_path, model, data)
    (_, _, warning, _) = (line for line in check_pipeline(found.file, models=True).lines[1:])
    assert warning.startswith("warning: ")
    assert warning.endswith(
        f"takes logits, and the model's outputs look like probabilities; {mend}"
    )
    (tmp_path / "fine").mkdir()
    fine = project(tmp_path / "fine", "log_probabilities", "classes")
    assert not any("warning" in line for line in check_pipeline(fine.file, models=True).lines)


def test_signs_of_shares_say_nothing_and_a_metric_of_them_is_warned_of(tmp_path) -> None:
    found = project(tmp_path, "shares", "binary", "metric: fidelity")
    lines = check_pipeline(found.file, models=True).lines
    assert any("warning: metric fidelity reads a yes from each positive" in line for line in lines)


def test_the_schema_contains_the_names(tmp_path) -> None:
    file = Path(__file__).parents[2] / "pipelines" / "pipeline.schema.json"
    assert '"smooth_l1"' in file.read_text()
    found = project(tmp_path, "mlp", "numbers", "loss: smooth_l1")
    assert Pipeline.from_yaml(found.file).loss == "smooth_l1"
