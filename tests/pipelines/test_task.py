"""The task of a pipeline: named or inferred, said aloud, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.common.errors import PipelineInvalid
from pipelines import Pipeline
from pipelines.commands.check import check_pipeline
from pipelines.planning.planner import build_plan, task_of
from tests.pipelines.conftest import Project

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 4))

    def forward(self, ids):
        return self.layers(ids)

def tagged():
    ids = torch.randint(0, 12, (240, 6), generator=torch.Generator().manual_seed(0))
    labels = ids % 4
    labels[:, -1] = -100
    return {"train": TensorDataset(ids[:160], labels[:160]),
            "val": TensorDataset(ids[160:], labels[160:])}

def mlp(outputs=4):
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))

def drawn(kind):
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    y = {"boxes": [x * 2], "none": []}[kind]
    return {"train": TensorDataset(x[:64], *(t[:64] for t in y)),
            "val": TensorDataset(x[64:], *(t[64:] for t in y))}
"""
AGREES = "{stage: export_onnx, gates: [{gate: label_agreement}]}"
REFUSED = r"stages\[0\].gates\[0\] \(label_agreement\): compares labels, and a model for "


def project(folder: Path, model: str, data: str, task: str, *stages: str) -> Project:
    (folder / "nets.py").write_text(NETS)
    lines = "\n".join(f"  - {stage}" for stage in stages)
    (folder / "small.yaml").write_text(
        f'version: 1\nmodel: {{factory: "nets:{model}"}}\ndata: {{factory: "nets:{data}"}}\n'
        f"{task}stages:\n{lines}\n"
    )
    return Project(folder)


@pytest.mark.slow
def test_a_tagger_needs_no_loss_of_its_own(tmp_path) -> None:
    train = "{stage: train, epochs: 4, batch_size: 16, optimizer: adamw, learning_rate: 0.03}"
    task = "task: token-classification\n"
    found = project(tmp_path, "Tagger", "tagged", task, train, AGREES)
    report = found.run()
    assert report.baseline.metric.name == "accuracy"
    assert report.baseline.metric.value > 0.95
    (verdict,) = report.stages[1].verdicts
    assert verdict.gate == "label_agreement" and verdict.value == 1


def test_an_embedding_is_measured_by_its_direction(tmp_path) -> None:
    stage = "{stage: quantize_dynamic, gates: [{gate: min_cosine, minimum: 0.9}]}"
    found = project(tmp_path, "mlp", "drawn", "task: embedding\n", stage)
    found.edit('"nets:drawn"', '"nets:drawn", arguments: {kind: none}')
    report = found.run()
    (verdict,) = report.stages[0].verdicts
    assert report.stages[0].measurements.metric is None
    assert 0.9 < verdict.value < 1
    found.edit("{gate: min_cosine, minimum: 0.9}", "{gate: max_drop, points: 1}")
    with pytest.raises(PipelineInvalid, match=r"max_drop\): the pipeline has no metric; add `met"):
        build_plan(Pipeline.from_yaml(found.file))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("task: detection\n", REFUSED + "detection gives boxes with scores; use parity or max_d"),
        ("loss: mse\n", REFUSED + r"regression gives numbers.* \(task: regression, as loss is mse"),
        ("metric: r2\n", REFUSED + r"regression.* \(task: regression, as metric is r2\)"),
        ("", REFUSED + r"regression.* \(task: .*, as targets are numbers\)"),
        ("task: regression\nmetric: fidelity\n", ":5: metric: metric 'fidelity' is for class l"),
        ("task: regression\nmetric: f1\n", "'f1' is .* regression gives numbers; use metric: mse$"),
        ("task: detection\nmetric: miou\n", "'miou' is .* gives boxes .*; use metric: map$"),
        ("task: multilabel\nmetric: perplexity\n", "'perplexity' is for .*; use metric: accuracy$"),
        ("loss: mse\nmetric: f1\n", r"metric 'f1' is for .* \(task: regression, as loss is mse"),
        ("task: regression\nloss: cross_entropy\n", ":5: loss: task: regression takes mse, l1, s"),
        ("task: regresion\n", ":4: task: expected 'classification', .* found 'reg"),
    ],
)
def test_labels_of_what_has_none_are_not_compared(tmp_path, lines, message) -> None:
    found = project(tmp_path, "mlp", "drawn", lines, AGREES)
    found.edit('"nets:drawn"', '"nets:drawn", arguments: {kind: boxes}')
    with pytest.raises(PipelineInvalid, match=message):
        check_pipeline(found.file, models=True)


def test_check_says_which_task_it_takes_the_model_for(tmp_path) -> None:
    found = project(tmp_path, "mlp", "drawn", "", "{stage: train, epochs: 1}")
    found.edit('"nets:drawn"', '"nets:drawn", arguments: {kind: boxes}')
    lines = check_pipeline(found.file, models=True).lines
    assert "task: regression, as targets are numbers" in lines
    assert any(line.endswith("metric: mse") for line in lines)


def test_default_gates_of_a_package_suit_the_task(tmp_path) -> None:
    stages = ("{stage: export_onnx}", "{stage: package_triton}")
    found = project(tmp_path, "mlp", "drawn", "task: regression\n", *stages)
    for task, gates in (("regression", ["parity"]), ("classification", ["label_agreement"])):
        found.edit("task: regression", f"task: {task}")
        last = build_plan(Pipeline.from_yaml(found.file)).stages[-1]
        assert [gate.gate for gate in last.stage.gates][: len(gates)] == gates


@pytest.mark.parametrize(
    ("config", "settings", "line"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            {},
            "task: causal-lm, as the model is a GPT2LMHeadModel",
        ),
        (
            {"architectures": ["BertForSequenceClassification"], "problem_type": "regression"},
            {},
            "task: regression, as the model's problem_type is regression",
        ),
        (
            {},
            {"model": {"task": "object-detection"}},
            "task: detection, as model.task is object-detection",
        ),
        ({"architectures": ["T5ForConditionalGeneration"]}, {}, ""),
        ({"architectures": ["BertForTokenClassification"]}, {"loss": "binary_cross_entropy"}, ""),
    ],
)
def test_the_task_follows_from_the_class_in_a_folder(tmp_path, config, settings, line) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    content = {
        "version": 1,
        "model": {"huggingface": str(tmp_path), **settings.get("model", {})},
        "stages": [{"stage": "export_onnx"}],
    }
    loss = {"loss": settings["loss"]} if "loss" in settings else {}
    task, reason = task_of(Pipeline.model_validate(content | loss))
    assert (f"task: {task.name}, {reason}" if task else "") == line


@pytest.mark.slow
def test_functions_take_a_task(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)), torch.randn(80, 4)
    data = (x, model(x).detach() + 0.3 * torch.randn(80, 2))
    with pytest.raises(PipelineInvalid, match=r"task: regression takes .*, found cross"):
        compress.quantize_dynamic(model, data=data, task="regression", task_loss="cross_entropy")
    with pytest.raises(PipelineInvalid, match="task 'regresion' is unknown"):
        compress.quantize_dynamic(model, data=data, task="regresion")
    result = compress.optimize(
        model, train=data, val=data, task="regression", max_drop=50, goal="smaller"
    )
    limits = {v.gate: v.limit for stage in result.report.stages for v in stage.verdicts}
    assert limits["max_drop"] == 50
    assert not {"max_relative_drop", "label_agreement"} & set(limits)
    assert result.report.baseline.metric.name == "r2"
