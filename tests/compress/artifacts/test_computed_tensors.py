"""Modules that keep tensors that autograd has computed, which `copy.deepcopy` refuses."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

import compress
from compress.common.forward import copy_module

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attribute:UserWarning"),
]
X = torch.randn(16, 3, 10, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 4


def layers(hook: Callable[[nn.Module], object]) -> nn.Module:
    module = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    for index in (0, 3):
        hook(module[index])
    return module


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = weight_norm(nn.LSTM(3, 8, batch_first=True), "weight_hh_l0")
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x.transpose(1, 2))[0][:, -1])


class KeepsFeatures(nn.Module):
    """Keeps what its layers computed, as models for perceptual losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.features = nn.Linear(30, 4), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features["last"] = [self.head(x.flatten(1))]
        return self.features["last"][0]


MODULES = {
    "weight_norm": lambda: layers(weight_norm),
    "spectral_norm": lambda: layers(spectral_norm),
    "prune": lambda: layers(lambda part: prune.l1_unstructured(part, "weight", 0.5)),
    "recurrent": Recurrent,
    "features": KeepsFeatures,
}


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    module = MODULES[request.param]()
    module(X)  # in training mode, with gradients
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(module)
    return module


def test_a_copy_computes_its_own_weights_and_trains(module: nn.Module) -> None:
    twin = copy_module(module)
    expected = module.eval()(X)
    assert torch.equal(twin.eval()(X), expected)
    twin.train()(X).sum().backward()
    gradients = [p.grad for p in twin.parameters() if p.requires_grad]
    assert all(g is not None for g in gradients) and any(g.any() for g in gradients)
    with torch.no_grad():
        for weight in twin.parameters():
            weight.add_(1)
    assert not torch.allclose(twin.eval()(X), expected)
    assert torch.equal(module.eval()(X), expected)


def test_empty_containers_of_a_copy_are_its_own_and_shared_ones_stay_shared() -> None:
    module = layers(lambda part: part)
    module.seen, module[0].seen = (seen := {}), seen
    twin = copy_module(module)
    twin[0].register_forward_hook(lambda *_: None)
    twin.seen["x"] = 1
    assert not module[0]._forward_hooks and not module.seen
    assert twin.seen is twin[0].seen


def test_it_is_imported_exported_and_quantized(module: nn.Module, tmp_path: Path) -> None:
    keys = [*module.state_dict()]
    graph = compress.export_program(module, tmp_path / "model.pt2", example_inputs=X)
    assert module.training and [*module.state_dict()] == keys
    with graph.open() as predict, torch.no_grad():
        torch.testing.assert_close(predict(X)[0], module.eval()(X), rtol=1e-4, atol=1e-5)
    names = {str(n.target) for n in graph.program().graph.nodes if n.op == "call_function"}
    assert not any("norm" in name for name in names), "weights are computed once"


def test_what_hooks_compute_is_quantized() -> None:
    model = compress.quantize_static(
        layers(weight_norm), data=list(zip(X, Y, strict=True)), calibration_samples=16
    )
    weights = model.program().state_dict.values()
    assert [w.shape for w in weights if w.dtype is torch.int8] == [(8, 3, 3), (4, 64)]
