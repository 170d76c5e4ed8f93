"""Where an export that answers otherwise went wrong, on faults planted in a translation."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript import opset18 as op

from compress.core.data import Splits
from compress.core.eager import EagerModel
from compress.core.errors import StageFailed
from compress.core.recipe import Recipe
from compress.core.signature import OutputSpec, Signature, TensorSpec
from compress.core.stage import Context
from export.onnx import ExportOnnx
from export.onnx_lowering import TRANSLATIONS

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.erf(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.side, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = torch.tanh(self.side(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x) + torch.erf(y).sum(-1, keepdim=True)

def net():
    return Net()
"""
ROWS = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 8)),), outputs=(OutputSpec(name="logits"),)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("net")
    (folder / "blocky.py").write_text(SOURCE)
    torch.manual_seed(0)
    recipe = Recipe(factory="blocky:net")
    state = recipe.build(folder).state_dict()
    return EagerModel.create(folder / "source", recipe, state, ROWS, folder=folder)


@pytest.fixture
def wrong_erf(monkeypatch: pytest.MonkeyPatch) -> None:
    def translate(x: Any) -> Any:
        return op.Mul(op.Erf(x), op.Constant(value_float=1.5))

    monkeypatch.setitem(TRANSLATIONS, torch.ops.aten.erf.default, translate)


def samples(count: int = 32) -> Splits:
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(8, generator=generator), torch.tensor(i % 3)) for i in range(count)]
    return Splits({"train": rows, "val": rows}, batch_size=16)


@pytest.mark.usefixtures("wrong_erf", "one_registry")
def test_the_first_wrong_layer_is_named_and_shown_in_a_fresh_process(
    model: EagerModel, tmp_path: Path
) -> None:
    context = Context(root=tmp_path / "onnx", data=samples())
    with pytest.raises(StageFailed) as refused:
        ExportOnnx()(model, context)
    folder = tmp_path / "parity" / "export_onnx"
    told = str(refused.value)
    report = json.loads((folder / "parity.json").read_text())
    assert "the first layer out of tolerance is " in told
    assert str(folder / "parity.json") in told
    first = report["first_layer"]
    assert first["operator"] == "aten.erf.default"
    assert first["verified"]
    assert first["module"] in ("blocks.0", "")
    print(told, json.dumps(report, indent=1))
    done = subprocess.run(
        [sys.executable, "-I", folder / "reproduce.py"], capture_output=True, text=True, cwd="/"
    )
    print(done)
    assert done.returncode == 1
