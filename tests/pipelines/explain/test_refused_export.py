"""`compress explain` on the file of an export that failed, which is kept beside its report."""

from pathlib import Path
from typing import Any

import pytest
import torch
from onnxscript import opset18 as op
from safetensors.torch import save_file

from compress.common.errors import StageFailed
from compress.export.onnx.lowering import TRANSLATIONS
from compress.export.onnx.stage import ExportOnnx
from compress.export.parity import report
from compress.pipelines import Pipeline
from compress.pipelines.explain.function import explain

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(torch.erf(self.up(x)))
"""
FILE = """\
version: 1
name: net
model:
  factory: wrong_erf:Net
  checkpoint: net.safetensors
  inputs: [{name: x, shape: [batch, 4]}]
stages: [{name: onnx, stage: export_onnx}]
"""


def test_the_kept_file_is_searched_without_running_the_stage_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def translate(x: Any) -> Any:
        return op.Mul(op.Erf(x), op.Constant(value_float=1.5))

    monkeypatch.setitem(TRANSLATIONS, torch.ops.aten.erf.default, translate)
    monkeypatch.setattr(report, "LEAST_SECONDS", 0.0)
    (tmp_path / "wrong_erf.py").write_text(NETS)
    scope: dict[str, Any] = {}
    exec(NETS, scope)
    torch.manual_seed(0)
    save_file(scope["Net"]().state_dict(), tmp_path / "net.safetensors")
    (tmp_path / "p.yaml").write_text(FILE)
    out = tmp_path / "run"
    with pytest.raises(StageFailed, match="which layer: compress explain "):
        Pipeline.from_yaml(tmp_path / "p.yaml").run(out)
    assert (out / "parity" / "onnx" / "refused" / "model.onnx").exists()

    def write(*_: object) -> None:
        raise AssertionError("the stage runs again")

    for name in ("write", "translated"):
        monkeypatch.setattr(ExportOnnx, name, write)
    (found,) = explain(out).explanations
    causes = {cause.cause: cause for cause in found.causes}
    assert [*causes["wrong_operator"].layers] == ["erf (aten.erf.default)"]
