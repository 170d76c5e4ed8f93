"""Modules that are built without drawing the weights that loading replaces."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.recipe import KeepIndices, Recipe
from compress.artifacts.uninitialized import build_to_load
from compress.checkpoint.state_dict import load_state_

X = torch.ones(2, 8)
states_after: list[torch.Tensor] = []
"""The generator's state at the end of each building."""


class Plain(nn.Module):
    """Layers as usual, one of which is copied."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.second = copy.deepcopy(self.first)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.embedding = nn.Embedding(4, 8, padding_idx=0)
        nn.init.xavier_normal_(self.first[0].weight.data).mul_(0.5)
        states_after.append(torch.get_rng_state())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(self.second(self.first(x)))[0] + self.embedding(x[:, 0].long())


class HasTable(Plain):
    """Draws a table, no part of its state dict, after its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table


class FillsTable(HasTable):
    """Fills such a table in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(8).normal_(), persistent=False)


class KeepsCopy(HasTable):
    """Keeps a tensor that is computed from its first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.first[0].bias.detach() * 2


class ReadsNumber(HasTable):
    """Keeps a number that is computed from its first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.tensor(float(self.first[0].weight.detach().std()))


class ReadsList(HasTable):
    """Reads its first weights without an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.tensor(self.first[0].bias.detach().tolist())


@pytest.fixture
def write(tmp_path: Path) -> Callable[[type[nn.Module]], EagerModel]:
    """Write an artifact of a class's module with other weights than it draws."""

    def written(kind: type[nn.Module]) -> EagerModel:
        module = kind()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.1).add_(
                    torch.linspace(0, 1, parameter.numel()).view_as(parameter)
                )
        factory = f"{__name__}:{kind.__name__}"
        return EagerModel.from_module(
            module.eval(), example_inputs=[X], factory=factory, root=tmp_path / "model"
        )

    return written


@pytest.mark.parametrize("kind", [Plain, HasTable, FillsTable, KeepsCopy, ReadsNumber, ReadsList])
def test_a_model_is_loaded_as_if_its_weights_had_been_drawn(write, kind) -> None:
    model = write(kind)
    expected = kind()
    load_state_(expected, model.load().state_dict(), "")
    for _ in range(2):  # a factory that needs its weights is known the second time
        before = torch.get_rng_state()
        module = model.load()
        assert torch.get_rng_state().equal(before)
        assert module(X).equal(expected.eval()(X))


def test_no_weight_is_drawn(write) -> None:
    model = write(Plain)
    states_after.clear()
    model.load()
    (state,) = states_after
    assert state.equal(torch.Generator().manual_seed(0).get_state())


@pytest.mark.parametrize("reads", [False, True])
def test_edits_may_cut_what_has_no_values_and_may_read_it(reads, monkeypatch) -> None:
    cut = KeepIndices(kept={"embedding.weight": {0: (0, 2)}})
    apply_, seen = KeepIndices.apply_, []

    def apply_and_read_(edit: KeepIndices, module: Plain) -> None:
        seen.append(float(module.first[0].bias.detach().sum()) if reads else 0.0)
        apply_(edit, module)

    monkeypatch.setattr(KeepIndices, "apply_", apply_and_read_)
    recipe = Recipe(factory=f"{__name__}:Plain", arguments={"seed": int(reads)}, edits=(cut,))
    expected = Plain(int(reads))
    states_after.clear()
    module = build_to_load(recipe, None, expected.state_dict().keys())
    assert module.embedding.weight.shape == (2, 8)
    assert seen == [float(expected.first[0].bias.detach().sum()) if reads else 0.0]
    undrawn = torch.Generator().manual_seed(int(reads)).get_state()
    # Where its values are read, it is built a second time.
    assert [state.equal(undrawn) for state in states_after] == [True, False][: 1 + reads]


def test_a_tensor_that_the_file_does_not_have_is_drawn() -> None:
    recipe = Recipe(factory=f"{__name__}:Plain")
    names = Plain().state_dict().keys() - {"first.0.weight"}
    expected = Plain()
    assert build_to_load(recipe, None, names).first[0].weight.equal(expected.first[0].weight)


@functools.cache
def seeded_table() -> torch.Tensor:
    return torch.empty(8).normal_(generator=torch.Generator().manual_seed(1))


class SharesTable(Plain):
    """Adds a table that is drawn with a seed of its own, once in a process."""

    def __init__(self) -> None:
        super().__init__()
        self.table = seeded_table()


class KeepsPickled(Plain):
    """Copies a layer in a way that runs no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.table = pickle.loads(pickle.dumps(self.first))[0].weight.detach()


@pytest.mark.parametrize("kind", [SharesTable, KeepsPickled])
def test_what_is_kept_besides_weights_has_its_values(kind) -> None:
    expected = kind().table.clone()
    seeded_table.cache_clear()
    module = build_to_load(
        Recipe(factory=f"{__name__}:{kind.__name__}"), None, Plain().state_dict().keys()
    )
    assert module.table.equal(expected)


class OwnStateDict(nn.Module):
    """Draws nothing, and makes its state dict in its own way."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}


def test_a_module_that_draws_nothing_is_not_asked_for_its_state_dict() -> None:
    recipe = Recipe(factory=f"{__name__}:OwnStateDict")
    assert isinstance(build_to_load(recipe, None, ()), OwnStateDict)
