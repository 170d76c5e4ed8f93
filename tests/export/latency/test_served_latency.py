"""Latency as served: of quantized and exported models, from one table for all runs of a machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.latency import kernels as kernel_table
from compress.export.latency import served_latency
from compress.export.latency.kernels import KernelTable
from compress.export.latency.served_latency import OnnxLatency
from compress.pruning.channel_settings import Target
from compress.pruning.prune_channels import PruneChannels
from compress.quantization.stages.static import QuantizeStatic

NET = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 3)
    )
"""
MACHINE = {"processor": "a processor"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("served")
    (folder / "servednet.py").write_text(NET)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="servednet:net")
    return import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=folder)


def refuse(*_: object) -> None:
    pytest.fail("measured again")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [pytest.param((), marks=pytest.mark.soak), (QuantizeStatic(calibration_samples=16),)],
)
def test_the_same_tables_lead_to_the_same_artifact_and_measure_nothing(
    model: EagerModel, blobs: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages
) -> None:
    def open_file(file: Path, *_: object) -> Any:
        return SimpleNamespace(open=file.stat().st_size)

    def compare(unpruned: int, size: int, *_: object, threads: int) -> Any:
        # Sizes for latencies, which vary.
        before, after = SimpleNamespace(p50=2.0), SimpleNamespace(p50=2.0 * size / unpruned)
        return SimpleNamespace(share=size / unpruned, before=before, after=after)

    monkeypatch.setattr(kernel_table, "KERNEL_SECONDS", 0.001)
    monkeypatch.setattr(served_latency, "FITTED", 3)
    monkeypatch.setattr(served_latency, "open_as_served", open_file)
    monkeypatch.setattr(served_latency, "compare_latency", compare)
    served = OnnxLatency("onnx", stages, tmp_path / "tables", MACHINE)
    stage = PruneChannels(target=Target(latency=0.5))
    first, second = (
        Context(root=tmp_path / name, data=blobs, served_latency=served) for name in ("a", "b")
    )
    slim = stage(model, first)
    facts: Any = slim.manifest.facts["latency"]
    quantized = "quantize_static → " * len(stages)
    assert facts["runtime"] == f"{quantized}onnxruntime {onnxruntime.__version__}"
    assert facts["measured"] <= 0.5
    assert facts["predicted"] > 0  # how near it is varies, as kernels are measured
    assert facts["ms"] == pytest.approx(2 * facts["measured"], rel=1e-3)
    table = KernelTable(tmp_path / "tables", MACHINE, 1)
    assert len(table.models) > facts["models_measured"], "and those that were fitted to"
    operators = {kernel.operator for kernel in table.kernels.values()}
    assert ("QuantizeLinear" in operators) == bool(stages)
    monkeypatch.setattr(kernel_table, "measure_kernels", refuse)
    monkeypatch.setattr(served_latency, "compare_latency", refuse)
    assert stage(model, second).digest == slim.digest
