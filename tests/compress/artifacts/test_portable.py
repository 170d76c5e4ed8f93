"""A changed model as one `.pt2` file, for those who do not have its class."""

from pathlib import Path

import pytest
import torch

from compress.artifacts.graph_model import GraphModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import KeepBlocks, KeepIndices, Recipe
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.norm = nn.Linear(width, 6), nn.LayerNorm(6)
        self.down = nn.Linear(6, width)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x)).relu())

class Net(nn.Module):
    def __init__(self, noise=False):
        super().__init__()
        self.layers, self.noise = nn.ModuleList(Block(4) for _ in range(3)), noise

    def forward(self, features):
        x = features
        for layer in self.layers:
            x = layer(x)
        return x + torch.randn_like(x) if self.noise else x
"""


@pytest.fixture
def make(tmp_path: Path):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "theirs.py").write_text(NET)
    signature = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))

    def make(**arguments):
        recipe = Recipe(factory="theirs:Net", arguments=arguments)
        return import_checkpoint(
            tmp_path / "source", recipe, signature, checkpoint=None, folder=tmp_path / "user"
        )

    return make


@pytest.mark.slow
def test_a_cut_model_answers_without_its_class_or_this_toolkit(tmp_path, make, fresh_torch):
    source = make()
    module = source.load()
    kept = {f"layers.0.{name}": {0: (0, 2, 3)} for name in ("up.weight", "up.bias")}
    kept |= {f"layers.0.norm.{name}": {0: (0, 2, 3)} for name in ("weight", "bias")}
    kept["layers.0.down.weight"] = {1: (0, 2, 3)}
    edits = [KeepBlocks(kept={"layers": (0, 2)}), KeepIndices(kept=kept)]
    for edit in edits:
        edit.apply_(module)
    slim = source.derive(tmp_path / "slim", module, edits=edits)
    portable = GraphModel.from_eager(slim, tmp_path / "portable")
    assert portable.parameters() == slim.parameters() < source.parameters()
    x = torch.randn(7, 4)
    with slim.open() as expected, portable.open() as answer:
        assert torch.equal(answer(x)[0], expected(x)[0])
    torch.save([x, slim.load()(x).detach()], tmp_path / "expected.pt")
    code = (
        "import sys, torch; x, y = torch.load('expected.pt', weights_only=True)\n"
        "assert torch.equal(torch.export.load('portable/model.pt2').module()(x), y)\n"
        "assert not {'theirs', 'compress'} & sys.modules.keys()"
    )
    fresh_torch(code)


def test_a_graph_that_answers_otherwise_is_refused(tmp_path, make):
    with pytest.raises(StageFailed, match="the traced graph answers otherwise than the model, by"):
        GraphModel.from_eager(make_noisy(make), tmp_path / "portable")
    assert not (tmp_path / "portable").exists()


def make_noisy(make):
    # Imported in the state in which it agrees with itself, which a random model does not.
    source = make()
    recipe = source.recipe.model_copy(update={"arguments": {"noise": True}})
    return source.create(
        source.path.with_name("noisy"),
        recipe,
        source.load().state_dict(),
        source.signature,
        folder=source.code,
    )
