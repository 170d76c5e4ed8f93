"""A quantized graph that a later stage exports is not timed, unless a gate asks."""

from types import SimpleNamespace
from typing import Any

import pytest

from compress.core.gates import MaxDrop, MaxMemory, MinSpeedup
from compress.export.onnx.stage import ExportOnnx
from compress.pipelines.runner.evaluator import _why_untimed
from compress.quantization.stages.static import QuantizeStatic

NOT_MEASURED = "not measured: exported by onnx"


def why(
    graph_gates: tuple[Any, ...] = (),
    file_gates: tuple[Any, ...] = (),
    kind: str = "graph",
    facts: tuple[str, ...] = ("fidelity",),
    exports: bool = True,
) -> str:
    int8 = SimpleNamespace(name="int8", input="source", stage=QuantizeStatic(gates=graph_gates))
    onnx = SimpleNamespace(name="onnx", input="int8", stage=ExportOnnx(gates=file_gates))
    artifact = SimpleNamespace(kind=kind, manifest=SimpleNamespace(facts=dict.fromkeys(facts)))
    plan = SimpleNamespace(stages=(int8, onnx) if exports else (int8,))
    return _why_untimed(SimpleNamespace(plan=plan, artifacts={"int8": artifact}), "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, NOT_MEASURED),
        ({"graph_gates": (MaxDrop(points=1),)}, NOT_MEASURED),
        ({"file_gates": (MinSpeedup(ratio=1),)}, NOT_MEASURED),
        ({"file_gates": (MinSpeedup(ratio=1, against="int8"),)}, ""),
        ({"graph_gates": (MaxMemory(mebibytes=1),)}, ""),
        ({"exports": False}, ""),
        ({"kind": "eager"}, ""),
        ({"facts": ()}, ""),
    ],
)
def test_a_graph_is_timed_where_somebody_needs_it(case: dict[str, Any], expected: str) -> None:
    assert why(**case) == expected
