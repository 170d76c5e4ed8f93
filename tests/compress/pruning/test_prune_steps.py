"""Several cuts in turn, and what a real network keeps without a training step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import ChannelSelection, Target
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.pruning_stage import Finetune
from compress.pruning.verification.masked_equivalence import VerificationInputs, other_sizes
from compress.training.stage import Train

DIGITS = Path(__file__).parents[3] / "examples" / "digits"


def resnet(path: Path) -> EagerModel:
    signature = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))
    recipe = Recipe(factory="models:resnet20")
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=DIGITS)


def test_cuts_in_turn_are_replayed_in_a_fresh_process(
    mlp: EagerModel,
    blobs: Splits,
    tmp_path: Path,
    assert_reloads_identically: Callable[[EagerModel], None],
) -> None:
    stage = PruneChannels(ratio=0.75, iterations=3, round_to=1)
    slim = stage(mlp, Context(root=tmp_path / "slim", data=blobs))
    assert [len(edit.kept["0.weight"][0]) for edit in slim.recipe.edits] == [12, 8, 4]
    assert slim.manifest.facts["families"] == [{"modules": ["0"], "before": 16, "after": 4}]
    assert_reloads_identically(slim)


def test_cuts_in_turn_end_where_one_cut_does(mlp: EagerModel, tmp_path: Path) -> None:
    for settings in ({"ratio": 0.5}, {"target": Target(parameters=0.5), "round_to": 1}):
        once, thrice = (
            PruneChannels(**settings, iterations=n)(mlp, Context(root=tmp_path / f"{n}{settings}"))
            for n in (1, 3)
        )
        assert thrice.parameters() == once.parameters()
        assert len(once.recipe.edits) == 1


def test_the_model_is_trained_after_each_cut(
    mlp: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    finetune = Finetune(epochs=2, batch_size=16, keep="last")
    stage = PruneChannels(ratio=0.5, iterations=2, round_to=1, finetune=finetune)
    context = Context(root=tmp_path / "slim", data=blobs)
    slim = stage(mlp, context)
    assert len(slim.recipe.edits) == 2
    untrained = stage.model_copy(update={"finetune": None})(
        mlp, context.with_root(tmp_path / "cut")
    )
    assert context.score(slim) > context.score(untrained)
    assert not (tmp_path / "slim.work").exists()


@pytest.mark.soak  # the next test has a refit exact, unit by unit
@pytest.mark.slow
def test_a_refit_saves_what_a_cut_breaks(digits: Splits, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "trained", data=digits)
    training = Train(epochs=3, batch_size=64)
    trained = training(resnet(tmp_path / "source"), context)
    before = context.score(trained)
    found = {}
    for refit in (False, True):
        stage = PruneChannels(ratio=0.5, refit=refit, calibration_samples=256)
        slim = stage(trained, context.with_root(tmp_path / f"{refit}"))
        found[refit] = context.score(slim)
    assert found[True] > before - 0.02 > found[False]


LINEAR = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3))
"""


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_after_each_cut_layers_are_refitted_to_the_rows_that_are_left(
    iterations: int, tmp_path: Path
) -> None:
    """Without activations half of the units can say all, so that a refit is exact, unit by unit."""
    (tmp_path / "linear.py").write_text(LINEAR)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="linear:net")
    torch.manual_seed(0)
    state = recipe.build(tmp_path).state_dict()
    model = EagerModel.create(tmp_path / "source", recipe, state, signature, folder=tmp_path)
    x = torch.randn(64, 4)
    data = Splits({"train": [(row, torch.tensor(0)) for row in x]}, batch_size=32)
    stage = PruneChannels(ratio=0.5, iterations=iterations, round_to=1, importance="random")
    slim = stage(model, Context(root=tmp_path / "slim", data=data))
    rows = torch.arange(16)
    for edit in slim.recipe.edits:
        rows = rows[list(edit.kept["1.weight"][0])]
    with torch.no_grad():
        expected, found = model.load()[:2](x)[:, rows], slim.load()[:2](x)
    assert len(slim.recipe.edits) == iterations
    assert (found - expected).norm() < 0.01 * expected.norm()


class LatePositions(nn.Module):
    """Has a layer with an entry for each position, of which short sequences read the first."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Linear(2, 16)
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late = self.positions(torch.ones(2, dtype=x.dtype))
        return self.down(F.gelu(self.up(x + late[: x.shape[1], None])))


def test_entries_that_only_longer_inputs_read_stay() -> None:
    torch.manual_seed(0)
    net, limits = LatePositions().eval(), ChannelSelection(round_to=1)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", "length", 4)),))
    inputs = signature.example()
    fooled, wise = (
        ranking.verify(ranking.allocate(0.5, limits))
        for ranking in (
            rank(net, VerificationInputs(inputs)),
            rank(net, VerificationInputs(inputs, others=other_sizes(signature, seed=0))),
        )
    )
    assert {cut.group.name for cut in fooled.groups} == {"positions", "up"}
    assert {cut.group.name for cut in wise.groups} == {"up"}
    assert "otherwise than its masked twin" in wise.pinned["positions"]
