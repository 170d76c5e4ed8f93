"""Numbers near 0 and 1 that torch's exporter leaves out."""

from pathlib import Path

import onnx
import torch
from torch import nn

import compress


class Levels(nn.Module):
    """The logarithm of a power, shared out, as of sounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        level = torch.log(x * x + 1e-10) * 1.000001
        return level / (level.abs().sum(-1, keepdim=True) + 1e-12)


def test_small_terms_stay(tmp_path: Path) -> None:
    rows = torch.randn(2, 3)
    file = compress.export_onnx(Levels(), tmp_path / "levels.onnx", example_inputs=rows)
    operators = [node.op_type for node in onnx.load(file.payload_path).graph.node]
    assert (operators.count("Add"), operators.count("Mul")) == (2, 2)
    with file.open() as predict:
        zeros = torch.zeros(2, 3)
        torch.testing.assert_close(predict(zeros)[0], Levels()(zeros))
