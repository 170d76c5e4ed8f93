"""Two tensors of one name are refused where the name is read, and no later."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.export.imported.exported_files import signature_of
from compress.pipelines import Pipeline

X = "{name: x, shape: [batch, 4]}"
TWICE = r"input and output names must differ; found twice: \['x'\]"


@pytest.mark.parametrize(
    "names", [f"inputs: [{X}, {X}]", f"inputs: [{X}]\n  outputs: [{{name: x}}]"]
)
def test_a_pipeline_file_with_a_double_name_is_refused(names: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    stages = "stages: [{stage: export_onnx}, {stage: package_torchserve}]"
    file.write_text(f"version: 1\nmodel:\n  factory: torch.nn:Identity\n  {names}\n{stages}\n")
    with pytest.raises(PipelineInvalid, match=TWICE):
        Pipeline.from_yaml(file)


def test_an_onnx_file_that_gives_an_input_back_is_refused(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [x, y])
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    with pytest.raises(ArtifactInvalid, match=rf"model\.onnx: {TWICE}; .* Identity operator"):
        signature_of("onnx", tmp_path / "model.onnx")
