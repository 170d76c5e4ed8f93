from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from tests.pipelines.conftest import measured_briefly


def network() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv1d(2, 16, 3), nn.ReLU(), nn.Flatten())
            self.classes = nn.Linear(16 * 6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classes(self.layers(x))

    torch.manual_seed(0)
    return Net()


@pytest.mark.slow
def test_a_class_of_a_function_goes_through_the_usual_pipeline(tmp_path: Path) -> None:
    model, x = network(), torch.randn(48, 2, 8, generator=torch.Generator().manual_seed(0))
    data = (x, model(x).argmax(1))
    with measured_briefly():
        result = compress.optimize(
            model, train=data, val=data, max_drop=7, goal="smaller", out=tmp_path / "out"
        )
    assert [stage.name for stage in result.report.stages] == ["quantize_static", "export_onnx"]
    limits = {v.gate: v.limit for stage in result.report.stages for v in stage.verdicts}
    assert limits["max_drop"] == 7
    assert result.module(x).shape == (48, 3)
    assert (tmp_path / "out" / "report.html").is_file()


def test_optimize_needs_data_to_decide_by() -> None:
    with pytest.raises(compress.PipelineInvalid, match="pass val="):
        compress.optimize(network(), train=torch.zeros(4, 2, 8))
