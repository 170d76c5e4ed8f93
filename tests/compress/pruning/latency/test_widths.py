"""What single cuts lose: each alone, whatever was measured before, and as much as is asked for."""

import math
from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.progress import silent
from compress.data.splits import Splits
from compress.pruning.channel_settings import ChannelSelection
from compress.pruning.depth.block_search import OutputErrorMeter
from compress.pruning.latency.widths import WidthSpace, measure_loss_increases

NET = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU(),
        nn.Linear(48, 3),
    )
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("harms")
    (folder / "harmnet.py").write_text(NET)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="harmnet:net")
    return import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=folder)


@pytest.fixture
def context(blobs: Splits, tmp_path: Path) -> Context:
    return Context(root=tmp_path, data=blobs)


@pytest.fixture
def space(model: EagerModel, context: Context) -> WidthSpace:
    return WidthSpace.from_model(
        model, context, ChannelSelection(importance="obs", round_to=8), values=3
    )


def test_the_grid_has_multiples_from_the_whole_width_down(space: WidthSpace) -> None:
    assert space.grid == {"0": (32, 16, 8), "3": (48, 32, 8)}
    assert space.whole == {"0": 32, "3": 48}


def test_a_cut_loses_the_same_whatever_was_cut_before(
    model: EagerModel, context: Context, space: WidthSpace
) -> None:
    meter = OutputErrorMeter(model.load(), model.signature, context, "outputs")
    weights = {n: t.clone() for n, t in space.ranking.module.state_dict().items()}
    losses = [meter.measure(space.cut("0", 8)).distance for _ in range(2)]
    assert losses[0] == losses[1] > 0
    assert all(torch.equal(t, weights[n]) for n, t in space.ranking.module.state_dict().items())
    cut = space.cut("3", 8)
    assert [layer.out_features for layer in cut if hasattr(layer, "out_features")] == [32, 8, 3]


def test_widths_beyond_the_deadline_are_estimated(space: WidthSpace) -> None:
    known: dict[str, float] = {}
    saved: list[int] = []

    def judge(module: torch.nn.Module) -> float:
        return 0.9

    def save() -> None:
        saved.append(len(known))

    harms = measure_loss_increases(space, silent, judge, known, save, math.inf)
    assert harms == {"0": {32: 0, 16: 0.9, 8: 0.9}, "3": {48: 0, 32: 0.9, 8: 0.9}}
    assert saved == [1, 2, 3, 4] and list(known) == ["0:8", "3:8", "0:16", "3:32"]
    late = measure_loss_increases(space, silent, judge, {"0:8": 0.9}, save, -math.inf)
    assert late["0"] == {32: 0, 16: pytest.approx(0.9 * (16 / 24) ** 2), 8: 0.9}
    assert late["3"][8] == pytest.approx((40 / 48) ** 2), "nothing is known of this group"
