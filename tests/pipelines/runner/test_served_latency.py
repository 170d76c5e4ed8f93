"""Which runtime a target of latency is for: that of a later stage which exports the result."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines import Pipeline
from pipelines.planning.planner import build_plan
from pipelines.runner.cache_keys import latency_parts, served_latency

PRUNE = {"stage": "prune_channels", "target": {"latency": 0.5}}
STATIC = {"stage": "quantize_static", "rounding": "adaround", "target": "onnxruntime-cpu"}
ONNX = {"stage": "export_onnx"}


def state_of(*stages: dict[str, Any], until: str | None = None, **settings: Any) -> Any:
    pipeline = Pipeline.model_validate(
        {
            "version": 1,
            "name": "served",
            "model": {"factory": "nets:net", "inputs": [{"name": "x", "shape": ["batch", 4]}]},
            "data": {"factory": "nets:data"},
            "loss": "mse",
            "stages": [*stages],
            **settings,
        }
    )
    plan = build_plan(pipeline, until=until)
    return SimpleNamespace(pipeline=pipeline, plan=plan, store=SimpleNamespace(root=Path("store")))


@pytest.mark.parametrize(
    ("later", "runtime", "quantizing"),
    [
        ([ONNX], "onnx", []),
        ([{"stage": "train", "epochs": 1}, ONNX], "onnx", []),
        ([STATIC, ONNX], "onnx", ["quantize_static"]),
        ([{"stage": "export_fastest", "runtimes": ["aot", "onnx"]}], "onnx", []),
        ([{"stage": "export_torchscript"}, {**ONNX, "input": "prune_channels"}], "onnx", []),
        ([{"stage": "export_torchscript"}], None, []),
        ([{"stage": "prune_layers", "remove": 1}, ONNX], None, []),
        ([{**ONNX, "input": "source"}], None, []),
    ],
)
def test_the_first_export_of_the_result_decides(later, runtime, quantizing) -> None:
    state = state_of(PRUNE, *later)
    planned = state.plan.stage("prune_channels")
    served = served_latency(planned, state)
    parts = latency_parts(planned, state)["latency"]
    assert parts["threads"] == 1 and "processor" in parts["machine"]
    if runtime is None:
        assert served is None and "served" not in parts
        return
    assert served.runtime == parts["served"]["runtime"] == runtime
    assert [stage.stage for stage in served.stages] == quantizing
    assert served.folder == Path("store", "latency")
    for stage in served.stages:
        assert (stage.rounding, stage.calibration_samples) == ("nearest", 32)
    # What is left out of a run decides the result just as well.
    part = state_of(PRUNE, *later, until="prune_channels")
    assert latency_parts(planned, part)["latency"] == parts


def test_widths_are_multiples_that_groups_of_weights_have() -> None:
    state = state_of(PRUNE, {"stage": "quantize_weights", "group_size": 64}, ONNX)
    assert served_latency(state.plan.stage("prune_channels"), state).width_multiple == 128


def test_other_targets_depend_on_no_machine() -> None:
    state = state_of({"stage": "prune_channels", "target": {"macs": 0.5}}, ONNX)
    planned = state.plan.stage("prune_channels")
    assert served_latency(planned, state) is None and latency_parts(planned, state) == {}
