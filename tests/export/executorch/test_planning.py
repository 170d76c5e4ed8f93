from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid, Unavailable
from compress.export.executorch.stage import EXECUTORCH
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from tests.export.builders import NETWORKS

PIPELINE = """
version: 1
code: {code}
model: {{factory: "networks:mlp", inputs: [{{name: image, shape: [batch, 1, 8, 8]}}]}}
stages:
  - {{stage: {stage}}}
  - {{stage: {then}}}
"""


def plan(folder: Path, stage: str, then: str) -> None:
    file = folder / "p.yaml"
    file.write_text(PIPELINE.format(code=NETWORKS, stage=stage, then=then))
    build_plan(Pipeline.from_yaml(file))


def test_a_plan_is_refused_where_executorch_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(EXECUTORCH), "missing", lambda need: need.what == "executorch")
    with pytest.raises(Unavailable, match=r"executorch.*pip install .*\[executorch\]"):
        plan(tmp_path, "export_program", "export_executorch")


@pytest.mark.parametrize(
    ("stage", "then", "refused"),
    [
        ("quantize_dynamic", "export_executorch", "quantize with target: xnnpack"),
        ("export_executorch", "package_triton", "'export_executorch' writes executorch"),
        (
            "export_program",
            "export_onnx, gates: [{gate: min_delegated, share: 0.9}]",
            "is for the results of export_executorch, found onnx",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, then: str, refused: str
) -> None:
    monkeypatch.setattr(type(EXECUTORCH), "missing", lambda _: False)
    with pytest.raises(PipelineInvalid, match=refused):
        plan(tmp_path, stage, then)
