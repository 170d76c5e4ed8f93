"""What a run leaves is what `compress serve --shadow` compares with, up to which limit."""

import numpy as np
import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.common.errors import PipelineInvalid
from compress.common.sealed_json import write_sealed
from compress.serve.shadow import comparison as comparisons
from compress.serve.shadow.comparison import opened
from compress.serve.shadow.options import ShadowOptions
from tests.pipelines.conftest import Project


def test_the_uncompressed_model_and_the_limit_are_the_runs(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project.out / "artifacts" / "export_onnx"
    options = ShadowOptions(folder, 1.0, project.folder / "state.json")

    def opening():
        artifact = Artifact.from_directory(folder)
        return opened(options, None, artifact.digest, artifact.signature)

    with pytest.raises(PipelineInvalid, match=r"no gate max_disagreement .* --shadow-limit"):
        opening().__enter__()
    gate = "{gate: max_disagreement, percent: 30, confidence: 0.9}"
    project.edit("{gate: parity, atol: 1e-4}", gate)
    report = project.run()
    with opening() as comparison:
        of = comparison.state.of
        assert (of.gate.percent, of.gate.confidence, of.task) == (30, 0.9, "classification")
        trained = {stage.name: stage.artifact.digest for stage in report.stages}["train"]
        assert of.uncompressed == trained == report.lock["artifacts"]["train"]
        x = np.eye(4, dtype=np.float32) * 3
        trained = Artifact.from_directory(project.out / "artifacts" / "train")
        with trained.open("cpu", 1) as predict:
            scores = predict(torch.from_numpy(x))[0].detach().numpy()
        drawn = [([x], [scores], None), ([x], [-scores], None)]
        comparison.compare(drawn, joins_rows=False)
        assert (comparison.state.compared, comparison.state.other) == (2, 1)
        assert comparison.compared_with.startswith("train in ONNX Runtime, exported and checked")
        write_sealed(options.state, comparison.state)
    monkeypatch.setattr(comparisons, "EXPORTED_BYTES", 10)
    with opening() as comparison:
        assert comparison.compared_with == "train as it is (eager)"
        assert comparison.state.compared == 2, "the same model, called in another way"
