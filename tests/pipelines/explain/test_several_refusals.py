"""Repairs that only together satisfy all gates: of a pruned network, and of what is made of it."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from compress.pipelines import Pipeline
from compress.pipelines.results.explanation import Explanations
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import measured_briefly
from tests.pipelines.explain.test_explain import NETS, compress, trained

FILE = """\
version: 1
name: net
model:
  factory: nets:net
  checkpoint: net.safetensors
  inputs: [{name: x, shape: [batch, 1, 6, 6]}]
data: {factory: "nets:data"}
stages:
  - {name: cut, stage: prune_channels, widths: {"4": 1}, round_to: 1, gates: [GATE]}
  - {name: int8, stage: quantize_static, calibration_samples: 96, gates: [GATE]}
  - {name: again, stage: quantize_static, input: source, calibration_samples: 96, gates: [GATE]}
""".replace("GATE", "{gate: max_drop, points: 3.0}")


@pytest.mark.soak
def test_all_refusals_are_explained_and_mended_together(tmp_path: Path, capfd) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.yaml").write_text(FILE)
    model = trained(NETS, steps=80)
    with torch.no_grad():
        model[0].weight[:2] *= 500
        model[0].bias[:2] *= 500
        model[2].weight[:, :2] /= 500
    save_file(model.state_dict(), tmp_path / "net.safetensors")
    out = tmp_path / "out"
    with measured_briefly():
        assert compress("run", tmp_path / "net.yaml", "--out", out) == 3
        report = Report.read(out)
        refused = [s.name for s in report.stages if any(not v.passed for v in s.verdicts)]
        assert refused == ["cut", "again"], "int8 was never made"
        capfd.readouterr()
        assert compress("repair", out) == 0
    said = capfd.readouterr().out
    found = Explanations.read(out, report)
    assert found is not None and found.chosen is not None
    assert [e.culprit for e in found.explanations] == ["cut", "again"]
    assert [e.causes[0].cause for e in found.explanations] == [
        "group_too_narrow",
        "unlike_channels",
    ]
    assert found.explanations[0].guilty[0].layer == "4"
    assert found.chosen["cut"]["widths"] == {"4": 9}
    assert found.chosen["int8"] == found.chosen["again"] == {"equalize": True}
    assert "at their own width they return" in said
    written = yaml.safe_load((out / "repair" / "pipeline.yaml").read_text())
    assert [stage.get("equalize") for stage in written["stages"]] == [None, True, True]
    repaired = Pipeline.from_yaml(out / "repair" / "pipeline.yaml")
    with measured_briefly():
        assert repaired.run(tmp_path / "again").status == "passed"
