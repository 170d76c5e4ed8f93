"""The stages that remove blocks and single weights, finished_run from a file."""

from pathlib import Path

import pytest

from compress.artifacts.eager_model import EagerModel
from compress.pipelines import Pipeline

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

def deep():
    blocks = nn.Sequential(*[Residual() for _ in range(4)])
    return nn.Sequential(nn.Linear(4, 16), blocks, nn.Linear(16, 3))

def data():
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return {"train": TensorDataset(x[:180], y[:180]), "val": TensorDataset(x[180:], y[180:])}
"""
FILE = """
version: 1
model:
  factory: nets:deep
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data"}
stages:
  - {stage: train, epochs: 3, batch_size: 20}
  - stage: prune_layers
    remove: 2
    finetune: {epochs: 1, batch_size: 20, learning_rate: 0.01, teaching: {soft_weight: 0.5}}
  - stage: prune_weights
    pattern: 2:4
    method: sparsegpt
    calibration_samples: 64
  - name: sparse
    stage: prune_weights
    input: prune_layers
    amount: 0.6
    schedule: cubic
    finetune: {epochs: 2, batch_size: 20, learning_rate: 0.01}
    gates: [{gate: max_drop, points: 40}]
"""


@pytest.mark.slow
def test_a_file_is_walked(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "small.yaml").write_text(FILE)
    report = Pipeline.from_yaml(tmp_path / "small.yaml").run(tmp_path / "out")
    facts = {stage.name: stage.artifact.facts for stage in report.stages}
    assert len(facts["prune_layers"]["removed"]) == 2
    assert facts["prune_weights"]["zeros"]["pruned_weights"] == 0.5
    assert abs(facts["sparse"]["zeros"]["pruned_weights"] - 0.6) < 0.01
    model = EagerModel.from_directory(tmp_path / "out" / "artifacts" / "prune_weights").load()
    assert len(model[1]) == 2
    assert ((model[1][0].up.weight.reshape(-1, 4) == 0).sum(1) == 2).all()
