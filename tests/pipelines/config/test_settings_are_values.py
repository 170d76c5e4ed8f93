"""Settings are values: what was validated, and what a manifest records of it, validates again."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from compress.common.config import Settings
from compress.core.gates.gate import gate_classes
from compress.data.splits import Splits
from compress.pipelines.config.auto_settings import (
    AutoLimits,
    AutoSettings,
    AutoSpace,
    WidthSettings,
)
from compress.pipelines.config.registry import stages
from compress.pruning.pruning_stage import Finetune
from compress.training.config.parallel import Parallel, PipelineParallel
from compress.training.config.training import (
    ActivationSegments,
    Callbacks,
    Checkpoints,
    Compilation,
    Profile,
    Trace,
    Training,
)
from compress.training.objectives.objective import Teaching

REQUIRED: dict[str, list[dict[str, Any]]] = {
    "train": [{"epochs": 1}],
    "distill": [
        {"epochs": 1, "teacher": "source"},
        {"epochs": 1, "teacher": "source", "losses": [{"loss": "kl", "temperature": 2}]},
        {"epochs": 2, "teacher": {"onnx": "a.onnx"}, "student": {"layers": [0, 2]}},
    ],
    "prune_channels": [
        {"ratio": 0.5},
        {"target": {"latency": 0.5, "batch": 8}},
        {"ratio": 0.5, "scope": "global", "max_ratio": 0.7},
        {"ratio": 0.5, "calibration_samples": 0},
        {"ratio": 0.5, "refit": True, "finetune": {"epochs": 1, "teaching": {}}},
    ],
    "prune_layers": [{"remove": 1}, {"keep": 2, "refit": True, "calibration_samples": 100}],
    "prune_weights": [{"amount": 0.5}, {"pattern": "2:4", "method": "wanda"}],
    "quantize_static": [{}, {"observer": "percentile", "percentile": 99.9}],
    "quantize_dynamic": [{}, {"target": "xnnpack"}, {"activation_range": "row", "smooth": "auto"}],
    "quantize_aware_training": [{"epochs": 1}, {"epochs": 1, "learn_steps": True}],
    "quantize_mixed": [{"max_drop_points": 1}],
    "quantize_weights": [{}, {"method": "hqq"}],
    "convert_precision": [{"dtype": "bfloat16"}],
    "package_torchserve": [{}],
    "package_kserve": [{"storage_uri": "s3://models"}],
    "parity": [{"atol": 1e-4}],
    "label_agreement": [{"minimum": 0.99}],
    "cascade": [{"fallback": "onnx", "percent": 1}],
    "max_disagreement": [{"percent": 1}],
    "min_cosine": [{"minimum": 0.99}],
    "max_divergence": [{"nats": 0.1}],
    "min_equal_tokens": [{"at": 0.9}],
    "max_drop": [{"points": 1}],
    "max_relative_drop": [{"percent": 1}],
    "min_metric": [{"at": 0.9}],
    "max_size": [{"ratio": 0.5}],
    "max_file_size": [{"mebibytes": 1}],
    "max_parameters": [{"ratio": 0.5}],
    "min_speedup": [{"ratio": 2}],
    "max_latency": [{"p95_ms": 2}],
    "max_memory": [{"mebibytes": 64}],
    "min_delegated": [{"share": 0.5}],
    "min_integer_macs": [{"share": 0.5}],
    "min_tokens_per_second": [{"at": 5}],
    "max_first_token": [{"ms": 5}],
}
"""Required settings of stages and gates, and variants of them; the others have none."""
NESTED: list[tuple[type[Settings], dict[str, Any]]] = [
    (Training, {"epochs": 1}),
    (Training, {"epochs": 1, "activation_checkpointing": {"segments": "auto"}}),
    (Training, {"epochs": 1, "compile": {"what": "whole"}, "schedule": "step"}),
    (Finetune, {"epochs": 1}),
    (Finetune, {"epochs": 1, "teaching": {"loss": "mse"}}),
    (Teaching, {}),
    *((Parallel, {"strategy": name}) for name in ("ddp", "fsdp", "zero1", "zero2", "zero3", "dp")),
    (Parallel, {"strategy": "deepspeed", "cpu_offload": True}),
    (Parallel, {"strategy": "fsdp", "processes": 4, "sharding": "hybrid_shard"}),
    (Parallel, {"processes": 2, "communication": "int8", "int8_rounding": "stochastic"}),
    (Parallel, {"processes": 2, "communication": "powersgd", "powersgd_rank": 2}),
    (Parallel, {"processes": 4, "tensor": 2}),
    (Parallel, {"processes": 2, "pipeline": {}}),
    (Parallel, {"nodes": 4, "min_nodes": 2}),
    (PipelineParallel, {}),
    (ActivationSegments, {}),
    (Checkpoints, {}),
    (Compilation, {}),
    (Profile, {"trace": {"active": 2}, "log_every": 1, "peak_flops": 1e12}),
    (Trace, {}),
    (Callbacks, {}),
    (AutoSettings, {}),
    (AutoSettings, {"limits": {"latency": "2ms", "size": "1MB", "memory": "64MiB"}, "time": "1h"}),
    (AutoLimits, {"latency": {"p95_ms": 2}}),
    (AutoSpace, {"recovery": {"epochs": 1}}),
    (WidthSettings, {}),
]


def _registered() -> Iterator[tuple[type[Settings], dict[str, Any]]]:
    for name, kind in {**stages(), **gate_classes()}.items():
        for given in REQUIRED.get(name, [{}]):
            yield kind, given
    yield from NESTED


ALL = [pytest.param(kind, given, id=f"{kind.__name__}-{given}") for kind, given in _registered()]


@pytest.mark.parametrize(("kind", "given"), ALL)
def test_settings_validate_their_own_dump(kind: type[Settings], given: dict[str, Any]) -> None:
    settings = kind.model_validate(given)
    dumped, as_json = settings.model_dump(), settings.model_dump(mode="json")
    assert kind.model_validate(dumped).model_dump() == dumped
    assert kind.model_validate(as_json).model_dump(mode="json") == as_json


@pytest.mark.parametrize("name", stages())
def test_what_a_manifest_records_of_a_stage_runs_again(name: str) -> None:
    kind = stages()[name]
    for given in REQUIRED.get(name, [{}]):
        if "teacher" in given and not isinstance(given["teacher"], str):
            continue  # another model is recorded by its content
        recorded = kind.model_validate(given).own_settings()
        assert kind.model_validate(recorded).own_settings() == recorded


def test_no_setting_behaves_by_whether_it_was_written() -> None:
    root = Path(__file__).parents[3]
    # Whether a model's outputs are known is no setting: `common/forward.py` completes a signature.
    known = {"compress/common/forward.py", "export/imported/exported_files.py"}
    asking = {
        str(file.relative_to(root))
        for folder in ("compress", "export", "serve", "pipelines")
        for file in (root / folder).rglob("*.py")
        if "model_fields_set" in file.read_text()
    }
    assert asking == known


def test_fewer_samples_than_the_default_are_no_error_unless_they_were_asked_for() -> None:
    inputs = torch.zeros(100, 4)
    data = Splits({"train": TensorDataset(inputs, torch.zeros(100, dtype=torch.long))})
    kinds = [kind for kind in stages().values() if "calibration_samples" in kind.model_fields]
    assert len(kinds) == 9
    for kind in kinds:
        (given, *_) = REQUIRED.get(kind.model_fields["stage"].default, [{}])
        assert kind.model_fields["calibration_samples"].default is None
        assert kind.model_validate(given).available_samples(data) in (100, 0)


@pytest.mark.parametrize("name", stages())
def test_the_example_in_a_stages_docstring_is_valid(name: str) -> None:
    text = inspect.cleandoc(stages()[name].__doc__ or "")
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):
            for step in yaml.safe_load(paragraph):
                stages()[step["stage"]].model_validate(step)
