"""`compress explain` on files that are too large, too slow or wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compress import cli
from compress.artifacts.artifact import Artifact
from compress.core.context import Context
from compress.pipelines.results.explanation import Explanation, Explanations
from compress.pipelines.results.schema import Report
from compress.profiling.benchmark import Comparison

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self, otherwise=False):
        super().__init__()
        self.table = nn.Embedding(400, 16)
        self.inner, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.otherwise = otherwise

    def forward(self, tokens):
        x = self.inner(self.table(tokens)).relu()
        if self.otherwise and torch.compiler.is_exporting():
            x = x * 1.25
        return self.head(x.mean(1))

def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(400, (96, 8), generator=generator)
    y = torch.randint(4, (96,), generator=generator)
    return {"train": TensorDataset(x[:48], y[:48]), "val": TensorDataset(x[48:], y[48:])}
"""
FILE = """\
version: 1
name: net
model:
  factory: nets:Net
  checkpoint: net.safetensors
  inputs: [{name: tokens, shape: [batch, 8], dtype: int64}]
data: {factory: "nets:data"}
stages:
  - {name: int8, stage: quantize_dynamic, embeddings: false}
  - {name: onnx, stage: export_onnx, gates: [{gate: max_size, ratio: 0.6, against: source}]}
"""


def compress(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.app([*map(str, arguments)])
    return int(end.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a network, its weights and a pipeline."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.yaml").write_text(FILE)
    scope: dict = {}
    exec(NETS, scope)
    torch.manual_seed(0)
    save_file(scope["Net"]().state_dict(), tmp_path / "net.safetensors")
    return tmp_path


def explanation(out: Path) -> Explanation:
    (found,) = Explanations.read(out, Report.read(out)).explanations
    return found


@pytest.mark.soak
def test_a_table_left_in_float_is_named_and_mended(folder: Path, capfd) -> None:
    out = folder / "out"
    assert compress("run", folder / "net.yaml", "--out", out) == 3
    assert compress("explain", out) == 0
    said = capfd.readouterr().out
    assert "tables of embeddings left in float" in said and "embeddings: true" in said
    found = explanation(out)
    assert (found.culprit, found.unit) == ("int8", "bytes")
    assert found.costs[0].module == "table"
    table = 400 * 16 * 4
    assert found.costs[0].before == table <= found.costs[0].now < 1.01 * table
    assert [cause.cause for cause in found.causes] == ["float_tables"]
    assert [*found.causes[0].layers] == ["table"] and found.causes[0].returned > 1
    assert compress("repair", out) == 0
    assert json.loads((out / "explain.json").read_text())["chosen"] == {
        "int8": {"embeddings": True}
    }


@pytest.mark.slow
def test_time_is_given_by_module(folder: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr("compress.pipelines.explain.explain.LONGER_SECONDS", 0.001)
    text = FILE.replace("max_size, ratio: 0.6,", "max_latency, p50_ms: 0.000001,")
    (folder / "net.yaml").write_text(text)
    out = folder / "out"
    assert compress("run", folder / "net.yaml", "--out", out) == 3
    beside: list[str] = []
    compare_latency = Context.compare_latency

    def recorded(self: Context, before: Artifact, *others: Any) -> Comparison:
        beside.append(before.kind)
        return compare_latency(self, before, *others)

    monkeypatch.setattr(Context, "compare_latency", recorded)
    compress("explain", out)  # what the time of so small a network is due to is not asserted
    assert {*beside} == {"eager"}, "as in the run, beside what the gate names"
    found = explanation(out)
    assert found.unit == "ms" and {cost.module for cost in found.costs} == {
        "table",
        "inner",
        "head",
    }
    assert all(cost.now > 0 for cost in found.costs)
    assert "as much as in the plain export" in capfd.readouterr().out
    assert "What each module of onnx costs, in ms" in (out / "report.html").read_text()


@pytest.mark.slow
def test_an_export_that_failed_is_explained(folder: Path, capfd) -> None:
    text = FILE.replace("factory: nets:Net", "factory: nets:Net\n  arguments: {otherwise: true}")
    text = text.replace("  - {name: int8, stage: quantize_dynamic, embeddings: false}\n", "")
    (folder / "net.yaml").write_text(text)
    out = folder / "out"
    assert compress("run", folder / "net.yaml", "--out", out) not in (0, 3)
    assert compress("explain", out) == 0
    found = explanation(out)
    assert (found.stage, found.culprit, found.artifact) == ("onnx", "onnx", "")
    assert found.causes[0].cause == "other_graph"
    assert "the graph that torch.export traced is wrong in PyTorch too" in capfd.readouterr().out
    assert found.repairs == ({"stage": "export_torchscript"},)


@pytest.mark.soak
def test_a_layer_left_in_float_is_named_and_mended(folder: Path, capfd) -> None:
    text = FILE.replace("embeddings: false", "exclude: [inner]")
    text = text.replace("max_size, ratio: 0.6, against: source", "min_integer_macs, share: 0.9")
    (folder / "net.yaml").write_text(text)
    out = folder / "out"
    assert compress("run", folder / "net.yaml", "--out", out) == 3
    assert compress("repair", out) == 0
    found = explanation(out)
    assert (found.culprit, found.unit) == ("int8", "float MACs")
    # Of each sample, eight tokens through `inner` and one mean through `head`.
    shares = {cost.module: cost.now / cost.before for cost in found.costs if cost.before}
    assert shares == {"inner": 1.0, "head": 0.0}
    assert [cause.cause for cause in found.causes] == ["excluded_layers"]
    said = capfd.readouterr().out
    assert "inner 97% (1×) of 2.11 k multiply-accumulates" in said
    assert json.loads((out / "explain.json").read_text())["chosen"] == {"int8": {"exclude": []}}


@pytest.mark.slow
def test_a_table_whose_channels_are_kept_is_named_and_mended(folder: Path, capfd) -> None:
    stages = """\
  - name: pruned
    stage: prune_channels
    ratio: 0.5
    round_to: 1
    exclude: [table]
    gates: [{gate: max_parameters, ratio: 0.6}]
"""
    text = FILE.partition("  - {name: int8")[0] + stages
    (folder / "net.yaml").write_text(text)
    out = folder / "out"
    assert compress("run", folder / "net.yaml", "--out", out) == 3
    assert compress("repair", out) == 0
    found = explanation(out)
    assert (found.stage, found.culprit, found.unit) == ("pruned", "pruned", "weights")
    weights = {cost.module: (cost.before, cost.now) for cost in found.costs}
    assert weights["table"] == (400 * 16, 400 * 16)
    assert [cause.cause for cause in found.causes] == ["excluded_layers"]
    assert [*found.causes[0].layers] == ["table"] and found.causes[0].returned > 1
    assert "weights table" in capfd.readouterr().out
    assert json.loads((out / "explain.json").read_text())["chosen"] == {"pruned": {"exclude": []}}
