"""Models that behave in eval mode as in training: dropout, random numbers, batch statistics."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import compress
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature
from compress.export.imported.exported_files import import_file
from compress.export.torchscript.file_io import quiet

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 3), norm or nn.Identity(), nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


class FunctionalDropout(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x))


class DropoutInTraining(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.train()
        return self.drop(super().forward(x))


class Noise(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(3)


class UnusedNoise(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0 * torch.rand(3)


class FunctionalNorm(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(super().forward(x), None, None, training=True)


@pytest.mark.parametrize("kind", [FunctionalDropout, DropoutInTraining, Noise])
def test_a_model_that_draws_random_numbers_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ArtifactInvalid, match=f"{kind.__name__} draws random numbers in eval mode"):
        compress.EagerModel.from_module(kind(), example_inputs=(X,))


def test_random_numbers_that_no_output_depends_on_are_allowed() -> None:
    compress.EagerModel.from_module(UnusedNoise(), example_inputs=(X,))


@pytest.mark.parametrize("name", ["model.ts", "model.pt2"])
def test_a_file_that_was_exported_in_training_mode_is_refused(name: str, tmp_path: Path) -> None:
    if name == "model.ts":
        with quiet():
            traced = torch.jit.trace(FunctionalDropout(), X, check_trace=False)
        traced.save(tmp_path / name)
    else:
        torch.export.save(torch.export.export(FunctionalDropout(), (X,)), tmp_path / name)
    kind = "torchscript" if name == "model.ts" else "graph"
    with pytest.raises(ArtifactInvalid, match=rf"{name} draws random numbers"):
        import_file(kind, tmp_path / name, Signature.from_examples([X], None), tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "make",
    [lambda: Net(nn.BatchNorm1d(3, track_running_stats=False)), FunctionalNorm],
)
def test_a_model_that_takes_no_single_row_is_refused(make) -> None:
    with pytest.raises(ArtifactInvalid, match=r"no batch of one row \(ValueError: Expected more"):
        compress.EagerModel.from_module(make(), example_inputs=(X,))
    fixed = Signature.from_examples([X], batch_axis=None)
    model = compress.EagerModel.from_module(make(), example_inputs=(X,), signature=fixed)
    with model.open() as predict:
        torch.testing.assert_close(predict(X)[0].mean(0), torch.zeros(3), atol=1e-5, rtol=0)


def test_a_model_in_training_mode_is_taken_in_eval_mode() -> None:
    module = Net(nn.BatchNorm1d(3)).train()
    model = compress.EagerModel.from_module(module, example_inputs=(X,))
    assert module.training and module.norm.training
    with model.open() as predict, torch.no_grad():
        torch.testing.assert_close(predict(X)[0], module.eval()(X))
