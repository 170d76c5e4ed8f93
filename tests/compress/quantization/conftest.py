"""Fixtures that the tests of quantization share."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.artifacts.graph_model import GraphModel
from tests.compress.quantization.builders import answer

FreshProcessCheck = Callable[..., None]


@pytest.fixture
def assert_same_in_fresh_process(
    tmp_path: Path, fresh_torch: Callable[[str], str]
) -> FreshProcessCheck:
    """Check that a process that has imported torch alone gives a graph's outputs, bit by bit."""

    def check(graph: GraphModel, *inputs: torch.Tensor) -> None:
        saved = str(tmp_path / "outputs.pt")
        torch.save({"inputs": inputs, "expected": answer(graph, *inputs)}, saved)
        code = f"""
import torch
from compress.artifacts.graph_model import GraphModel
saved = torch.load({saved!r})
with GraphModel.from_directory({str(graph.path)!r}).open() as predict:
    print(torch.equal(predict(*saved["inputs"])[0], saved["expected"]))
"""
        assert fresh_torch(code) == "True"

    return check
