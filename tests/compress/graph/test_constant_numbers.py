"""Numbers that a model reads of its own tensors are constants of its graph; others are not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.signature import Signature
from compress.graph import constant_numbers
from compress.graph.torch_export import export_program

X = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))


class Reads(nn.Module):
    """Shifts and cuts off its outputs by numbers that it reads of tensors."""

    def __init__(self, steps: Callable[[nn.Module, torch.Tensor], float]) -> None:
        super().__init__()
        self.steps, self.linear = steps, nn.Linear(12, 12)
        self.register_buffer("shift", torch.tensor(1.2))
        self.register_buffer("widths", torch.tensor([12, 6]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).roll(-round(self.shift.cpu().item() * 3), -1)
        return y[:, : int(self.steps(self, x))]


def written(model: nn.Module, x: torch.Tensor) -> float:
    model.shift[()] = x.sum()
    return model.shift.abs().item() % 5 + 2


def replaced(model: nn.Module, x: torch.Tensor) -> float:
    model.shift = x.sum().abs()
    return model.shift.item() % 5 + 2


@pytest.mark.parametrize(
    "steps",
    [
        lambda model, x: model.widths.tolist()[1],
        lambda model, x: (model.widths[1] + 1).item() if model.shift > 1 else 3,
        lambda model, x: model.widths.max() - 4,
    ],
    ids=["list", "branch", "computed"],
)
def test_a_models_own_numbers_are_constants(steps, tmp_path: Path) -> None:
    model = Reads(steps).eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    program = export_program(model, Signature.from_examples((X,)))
    targets = {str(node.target) for node in program.graph.nodes}
    assert not any("item.default" in name or "round" in name for name in targets)
    small = compress.quantize_dynamic(model, example_inputs=(X,))
    compress.export_onnx(small, tmp_path / "model.onnx")
    torch.testing.assert_close(flatten_outputs(program.module()(X))[0], model(X))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("steps", [lambda model, x: x.abs().max() + 1, written, replaced])
def test_numbers_of_the_data_are_not(steps) -> None:
    model = Reads(steps).eval()
    try:
        program = export_program(model, Signature.from_examples((X,)))
    except StageFailed as error:
        assert "ata-dependent" in str(error) or "item" in str(error) or "u0" in str(error)
    else:
        assert any("item.default" in str(node.target) for node in program.graph.nodes)


def test_the_models_tensors_are_not_searched_for_each_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a hundred layers that took most of a minute."""
    searches: list[nn.Module] = []
    tensors = constant_numbers._tensors
    found = lambda module: (searches.append(module), tensors(module))[1]  # noqa: E731
    monkeypatch.setattr(constant_numbers, "_tensors", found)
    model = Reads(lambda model, x: 6).eval()
    model.linear = nn.Sequential(*(nn.Linear(12, 12) for _ in range(10)))
    program = export_program(model, Signature.from_examples((X,)))
    assert not any("item.default" in str(node.target) for node in program.graph.nodes)
    assert len(searches) < 10
