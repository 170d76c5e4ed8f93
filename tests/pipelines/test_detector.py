"""A model of two outputs with nested targets: what `check` refuses before anything runs."""

from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.pipelines.commands.check import check_pipeline
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import Project

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 16), nn.Linear(16, 7)

    def forward(self, x):
        y = self.head(self.hidden(x).relu())[:, None]
        return {"logits": y[..., :3], "pred_boxes": y[..., 3:].sigmoid()}

def images(samples, seed, key="boxes"):
    x = torch.rand(samples, 4, generator=torch.Generator().manual_seed(seed))
    boxes = 0.3 + 0.4 * x
    return [(a, {key: b[None], "labels": (a[:1] > 0.5).long()}) for a, b in zip(x, boxes)]

def data(val="boxes", test="boxes", labelled=True):
    splits = {"train": images(48, 0), "val": images(40, 1, val), "test": images(40, 2, test)}
    return splits if labelled else {**splits, "val": [x for x, _ in splits["val"]]}

def loss(outputs, targets):
    boxes = torch.cat([y["boxes"] for y in targets])
    labels = torch.cat([y["labels"] for y in targets])
    distance = F.l1_loss(outputs["pred_boxes"][:, 0], boxes)
    return F.cross_entropy(outputs["logits"][:, 0], labels) + distance

def two_numbers(outputs, targets):
    return torch.stack([x.sum() for x in outputs.values()])

def lost(outputs, targets):
    return float(outputs["boxes"].sum())

def rare(outputs, targets):
    if len(targets) < 40:
        raise ValueError("needs more samples")
    return 1.0
"""


def project(folder: Path, metric: str = "map", data: str = "{}") -> Project:
    (folder / "nets.py").write_text(NETS)
    (folder / "small.yaml").write_text(
        'version: 1\nmodel: {factory: "nets:Detector"}\n'
        f"data: {{factory: nets:data, arguments: {data}}}\n"
        f"loss: nets:loss\nmetric: {metric}\nstages:\n"
        "  - {stage: train, epochs: 3, batch_size: 16, learning_rate: 0.02, optimizer: adamw}\n"
    )
    return Project(folder)


OWN = '{{name: "nets:{}", higher_is_better: true}}'


@pytest.mark.parametrize(
    ("metric", "data", "reason"),
    [
        (OWN.format("two_numbers"), "{}", r":5: metric: on split 'val': .* returned a tensor of s"),
        (
            OWN.format("lost"),
            "{}",
            r":5: metric: on split 'val': .*logits float32 \[n, 1, 3\], pre",
        ),
        ("map", "{val: corners}", r":5: metric: on split 'val': .*\[\{corners: float32 \[1, 4\]"),
        ("map", "{test: corners}", r":5: metric: on split 'test': .* a mapping of boxes and label"),
        ("map", "{labelled: false}", r":5: metric: on split 'val': metric map needs targets and"),
        ("accuracy", "{}", r":5: metric: on split 'val': metric accuracy takes targets that are"),
        ("loss", "{val: corners}", r":5: metric: on split 'val': loss 'nets:loss' fails .*boxes"),
    ],
)
def test_a_metric_that_would_fail_is_refused_by_check(tmp_path, metric, data, reason):
    with pytest.raises(PipelineInvalid, match=reason):
        check_pipeline(project(tmp_path, metric, data).file, models=True)


def test_a_metric_that_needs_more_samples_gets_them(tmp_path):
    check_pipeline(project(tmp_path, OWN.format("rare")).file, models=True)


def test_a_detector_is_trained_and_measured(tmp_path):
    found = project(tmp_path)
    report = found.run()
    assert report.stages[0].measurements.metric.name == "map"
    assert Report.read(found.out).test.values["train"] > 0
