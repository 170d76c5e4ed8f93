"""`compress latency`: kernels and predictions beside measurements, on a small network."""

import json
from pathlib import Path

import pytest

from compress import cli
from compress.export.latency import kernels as kernel_table
from compress.pipelines.commands import latency

NETS = """
import torch
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 3),
    )
"""
FILE = """\
version: 1
name: net
model:
  factory: nets:net
  inputs: [{name: x, shape: [batch, 1, 8, 8]}]
stages:
  - {stage: prune_channels, ratio: 0.5, round_to: 8, exclude: ["0"]}
"""


@pytest.mark.slow
def test_variants_are_predicted_beside_what_was_measured(
    tmp_path: Path, monkeypatch, capfd
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.yaml").write_text(FILE)
    monkeypatch.setattr(latency, "FITTED_VARIANTS", 3)
    monkeypatch.setattr(latency, "TESTED_VARIANTS", 2)
    arguments = ["latency", str(tmp_path / "net.yaml"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as end:
        cli.app([*arguments, "--batch", "2", "--json"])
    assert not end.value.code
    found = json.loads(capfd.readouterr().out)
    assert found == json.loads((tmp_path / "out" / latency.LATENCY_FILE).read_text())
    whole, *others = found["variants"]
    assert whole["widths"] == {"2": 32}, "the stage excludes the first layer"
    assert all(8 <= variant["widths"]["2"] <= 32 for variant in others)
    assert all(variant["widths"]["2"] % 8 == 0 for variant in others)
    assert [variant["fitted"] for variant in found["variants"]] == [True] * 3 + [False] * 2
    assert all(variant["predicted_ms"] > 0 for variant in found["variants"])
    operators = {kernel["operator"] for kernel in found["kernels"]}
    assert {"Conv", "Gemm"} <= operators
    (table,) = (tmp_path / "out" / kernel_table.TABLES).iterdir()
    kernels = json.loads(table.read_text())["content"]["kernels"]
    with pytest.raises(SystemExit):
        cli.app(arguments)
    assert "fitted to 3 models; on 2 others the mean error is" in capfd.readouterr().out
    assert json.loads(table.read_text())["content"]["kernels"].items() >= kernels.items()
