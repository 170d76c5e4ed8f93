import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.core.context import Context
from compress.core.stage import Stage
from compress.quantization.pt2e.observers import OBSERVERS
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.half_precision import ConvertPrecision
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from tests.compress.quantization.builders import build_model, labelled_images

CALIBRATE = """
import copy, resource
import torch
from torch.utils.data import Dataset
from compress.data.splits import Splits
from compress.common.signature import Signature, TensorSpec
from compress.quantization.pt2e.graph_capture import capture
from compress.quantization.ptq.calibrate import calibrate_
from compress.quantization.pt2e.observers import OBSERVERS
from compress.quantization.pt2e.torchao_api import prepare_pt2e
from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer
from compress.quantization.pt2e.observer_ranges import fit_ranges_, range_facts
from compress.quantization.stages.base import CalibrationData
from compress.quantization.config.dtype_scheme import scheme_for

class Images(Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 32, 32, generator=generator), 0

torch.set_num_threads(1)
signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 32, 32)),))
layers = [torch.nn.Conv2d(1 if i == 0 else 16, 16, 1) for i in range(4)]
network = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())])
graph = capture(network.eval(), signature)

def calibrate(observer, samples):
    quantizer = OnnxRuntimeQuantizer(scheme_for("onnxruntime-cpu"), observer)
    prepared = prepare_pt2e(copy.deepcopy(graph), quantizer)
    calibration = CalibrationData(Splits({"train": Images()}, 32), samples, seed=0)
    ranges = calibrate_(prepared, signature, calibration, lambda seen: None)
    fit_ranges_(prepared)
    range_facts(ranges)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

few = max(calibrate(observer, 64) for observer in OBSERVERS)
print(*(f"{observer}={calibrate(observer, 2048) / few}" for observer in OBSERVERS))
"""


@pytest.mark.soak
def test_memory_does_not_grow_with_samples(fresh_process: Callable[[str], str]) -> None:
    ratios = dict(part.split("=") for part in fresh_process(CALIBRATE).split())
    assert ratios.keys() == OBSERVERS.keys()
    assert all(float(ratio) <= 1.1 for ratio in ratios.values()), ratios


@pytest.mark.parametrize(
    "stage",
    [
        QuantizeStatic(calibration_samples=32),
        QuantizeDynamic(),
        QuantizeWeights(),
        ConvertPrecision(dtype="bfloat16"),
    ],
    ids=lambda stage: stage.title,
)
def test_a_model_is_compared_when_the_weights_it_was_quantized_from_are_gone(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded, left = EagerModel.load, [], []
    create, written = GraphModel.create, []

    def watched_create(*arguments: Any, **details: Any) -> GraphModel:
        written.append(sum(weights() is not None for weights in loaded))
        return create(*arguments, **details)

    def watched(model: EagerModel) -> torch.nn.Module:
        left.append(sum(weights() is not None for weights in loaded))
        module = load(model)
        # That of the linear layer; what a stage leaves in float is part of the graph.
        loaded.append(weakref.ref(max(module.parameters(), key=torch.Tensor.numel)))
        return module

    model = build_model(tmp_path / "source", "networks:flattened")
    monkeypatch.setattr(EagerModel, "load", watched)
    monkeypatch.setattr(GraphModel, "create", watched_create)
    stage(model, Context(root=tmp_path / "small", data=labelled_images()))
    assert left == [0, 0]
    assert written == [0], "the model that it was compared with"
