from collections.abc import Callable

import pytest

from compress.quantization.pt2e.observers import OBSERVERS

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
