"""Named axes of which not every size is allowed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from compress.common.errors import StageFailed
from compress.common.signature import AxisBounds, Signature, TensorSpec
from compress.core.context import Context
from compress.export.exported_program import ExportProgram
from compress.export.parity import compare
from compress.export.tensorrt.runtime import sizes_of
from compress.graph.torch_export import axis_limits
from compress.serve.worker.tensors import check
from tests.export.builders import network_of

SHORT = """
from torch import nn

class Window(nn.Module):
    def forward(self, x):
        return x.sum(1) if x.shape[1] >= 6 else x.sum(1) - 1

def window():
    return Window()
"""
SPEC = TensorSpec(name="x", shape=("batch", "length", 2))


def signature(**bounds: int) -> Signature:
    axes = {"length": AxisBounds(**bounds)} if bounds else {}
    return Signature(inputs=(SPEC,), axes=axes)


@pytest.mark.parametrize("bounds", [{}, {"min": 6, "max": 20}], ids=["any", "6 to 20"])
def test_an_export_is_traced_and_compared_within_the_bounds(bounds, tmp_path: Path) -> None:
    model = network_of(tmp_path, SHORT, "windows:window", signature(**bounds))
    stage, context = ExportProgram(), Context(root=tmp_path / "program")
    if not bounds:
        with pytest.raises(
            StageFailed, match=r"where 6 <= length; .* model\.axes: \{length: \{min: 6\}\}"
        ):
            stage(model, context)
        return
    program = stage(model, context).program()
    assert axis_limits(program, model.signature) == {"length": 20}
    with pytest.raises(Exception, match=r"5|6"):
        program.module()(torch.zeros(2, 5, 2))


def test_the_sizes_tried_are_those_allowed() -> None:
    def tried(**bounds: int) -> tuple[int, ...]:
        return compare._sizes(signature(**bounds), "length", None)

    assert tried() == (8, 16, 4, 7)
    assert tried(max=512) == (8, 16, 4, 7, 512)
    assert tried(min=6, max=10) == (8, 7, 10, 6)
    assert tried(min=600) == (600, 1200)
    assert tried(min=600, max=700) == (700, 600)
    assert tried(min=20, max=512) == (512, 20, 40)
    assert tried(min=20, max=4096) == (20, 40)
    (example,) = signature(min=600).example(batch=3)
    assert example.shape == (3, 600, 2)


def test_an_engine_is_built_for_them() -> None:
    assert sizes_of(signature(min=6, max=100), {})["length"] == (6, 100, 100)
    assert sizes_of(signature(min=6, max=512), {})["length"] == (6, 128, 512)
    with pytest.raises(StageFailed, match=r"leaves what model.axes allows, 6 or more"):
        sizes_of(signature(min=6), {"length": (1, 8, 16)})
    with pytest.raises(StageFailed, match="has no sizes"):
        sizes_of(signature(min=6), {})


def test_requests_outside_are_refused() -> None:
    specs = signature(min=6, max=20).input_descriptions()
    check([np.zeros((1, 6, 2), np.float32)], specs, max_rows=8)
    for length in (5, 21):
        with pytest.raises(ValueError, match=f"x: length is {length}, expected 6 to 20"):
            check([np.zeros((1, length, 2), np.float32)], specs, max_rows=8)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"width": {"min": 2}}, "'width' is not a named axis of the inputs; they have length"),
        ({"batch": {"min": 2}}, "'batch' is the batch"),
        ({"length": {"min": 8, "max": 8}}, "declare the number"),
        ({"length": {"min": 0}}, "greater than 0"),
    ],
)
def test_bounds_of_nothing_are_refused(axes, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Signature.model_validate({"inputs": [SPEC], "axes": axes})


def test_a_sample_outside_is_named(tmp_path: Path) -> None:
    model = network_of(tmp_path, SHORT, "windows:window", signature(min=6))
    with model.open() as predict:
        compare.compare_outputs(model, predict, predict, [(torch.ones(2, 6, 2),)])
        with pytest.raises(StageFailed, match=r"'length' has size 5 .* allows 6 or more"):
            compare.compare_outputs(model, predict, predict, [(torch.ones(2, 5, 2),)])
