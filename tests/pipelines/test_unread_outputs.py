"""Outputs that no loss, metric or gate reads, and rows that no sample of a check shows."""

from pathlib import Path

import pytest

from compress.common.errors import StageFailed
from compress.pipelines.api import Pipeline
from compress.pipelines.reporting.stage_rows import headline
from compress.pipelines.reporting.terminal_table import closing_lines
from compress.pipelines.results.schema import Report

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
        self.classes, self.depth = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.body(x)
        return {"logits": self.classes(hidden), "depth": self.depth(hidden)}

def two_heads():
    torch.manual_seed(0)
    return TwoHeads()

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 8, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return {"train": TensorDataset(x[:150], y[:150]), "val": TensorDataset(x[150:], y[150:])}

def all_outputs(outputs, targets):
    return float((outputs["logits"].argmax(1) == targets).float().mean())

class Chaotic(nn.Module):
    # Where the first number is above 5, the last bits of variances, which each library sums up in
    # its own order, grow to other answers. A linear layer's are the same on some processors.
    def __init__(self):
        super().__init__()
        self.sum = nn.Linear(256, 3)

    def forward(self, x):
        sums, normed = self.sum(x), nn.functional.layer_norm(x, (256,))
        return torch.where(x[:, :1] > 5, 4 * torch.sin(1e9 * normed[:, :3]), sums)

def chaotic():
    torch.manual_seed(0)
    return Chaotic()

def rare():
    x = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0)).clamp(max=4)
    x[3001:3003, 0] = 6.0  # none of the 128 rows that the stage itself compares
    return {"val": TensorDataset(x, torch.arange(4000) % 3)}
"""


def run(folder: Path, text: str) -> Report:
    (folder / "nets_unread.py").write_text(NETS)
    (folder / "p.yaml").write_text(f"version: 1\n{text}")
    return Pipeline.from_yaml(folder / "p.yaml").run(folder / "out")


HEADS = "model: {factory: 'nets_unread:two_heads'}\ndata: {factory: 'nets_unread:data'}\n"
TRAIN = """
stages:
  - {stage: train, epochs: 3, batch_size: 8, learning_rate: 0.1}
  - {stage: train, name: again, epochs: 3, batch_size: 8, learning_rate: 0.1, gates: [%s]}
  - {stage: export_onnx}
"""


@pytest.mark.slow
def test_an_output_that_nothing_reads_is_named_and_nothing_is_named_for_deployment(tmp_path):
    report = run(tmp_path, HEADS + TRAIN % "{gate: label_agreement, minimum: 0}")
    _, again, export = report.stages
    assert [*again.unread_outputs] == ["depth"]
    assert again.unread_outputs["depth"] > 0.01
    assert export.unread_outputs == {}  # an export computes what its source does
    (warning,) = [w for w in report.warnings if "'depth'" in w]
    assert warning.startswith("again: output 'depth' differs from that of train by ")
    assert headline(report) is None
    assert "deploy " not in " ".join(map(str, closing_lines(report, tmp_path)))
    assert Report.read(tmp_path / "out").stages[1].unread_outputs == again.unread_outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(TRAIN % "{gate: parity, atol: 1000}", marks=pytest.mark.soak),
        TRAIN.replace(
            "export_onnx", "export_onnx, gates: [{gate: parity, atol: 1000, against: train}]"
        )
        % "",
        "metric: {name: 'nets_unread:all_outputs', higher_is_better: true}" + TRAIN % "",
    ],
    ids=["a gate", "a gate of a later stage", "a metric"],
)
def test_an_output_that_something_reads_is_not_named(tmp_path, setting):
    report = run(tmp_path, HEADS + setting)
    assert not any(stage.unread_outputs for stage in report.stages)
    assert headline(report) is not None


@pytest.mark.slow
def test_an_export_is_compared_on_all_of_val(tmp_path):
    with pytest.raises(StageFailed, match="on all 4000 rows of `val` answers differ"):
        run(
            tmp_path,
            "model: {factory: 'nets_unread:chaotic'}\ndata: {factory: 'nets_unread:rare'}\n"
            "stages: [{stage: export_onnx}]\n",
        )
