from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MaxParameters
from compress.data.splits import Splits
from compress.pruning.prune_layers import PruneLayers
from compress.pruning.pruning_stage import Finetune
from compress.training.config.training import Training
from compress.training.objectives.teacher_objective import Teaching

HERE = Path(__file__).parent


def sealed(path: Path, net: str, width: int = 4) -> EagerModel:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", width)),))
    recipe = Recipe(factory=f"pruning_block_nets:{net}")
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=HERE)


@pytest.fixture
def deep(tmp_path: Path) -> EagerModel:
    return sealed(tmp_path / "deep", "Deep")


def test_blocks_with_the_least_error_are_removed(deep: EagerModel, tmp_path: Path) -> None:
    progress = []
    context = Context(root=tmp_path / "slim", progress=lambda *step: progress.append(step))
    slim = PruneLayers(remove=2)(deep, context)
    facts = slim.manifest.facts
    assert facts["kept"] == {"blocks": [0, 2, 4]}
    assert [step["block"] for step in facts["removed"]] == ["blocks.3", "blocks.1"]
    harm = {name: found["distance"] for name, found in facts["harm_alone"].items()}
    assert sorted(harm, key=harm.get)[:2] == ["blocks.3", "blocks.1"] and len(harm) == 5
    assert facts["judged_by"] == "outputs" and facts["stayed"] == {}
    assert len(progress) == 5 + 4 and progress[-1][1:3] == (9, 9)
    whole, module = deep.load(), slim.load()
    assert torch.equal(module.blocks[1].first.weight, whole.blocks[2].first.weight)
    x = slim.signature.example(seed=3)
    difference = (module(*x) - whole(*x)).norm() / whole(*x).norm()
    assert difference < 0.02


def test_the_best_pair_is_not_the_two_best_blocks(tmp_path: Path) -> None:
    model = sealed(tmp_path / "source", "Together")
    slim = PruneLayers(keep=2)(model, Context(root=tmp_path / "slim"))
    harm = {k: v["distance"] for k, v in slim.manifest.facts["harm_alone"].items()}
    assert sorted(harm, key=harm.get) == [f"blocks.{i}" for i in (0, 1, 2, 3)]
    assert slim.manifest.facts["kept"] == {"blocks": [1, 3]}


def test_outputs_are_identical_in_another_process(
    deep: EagerModel, tmp_path: Path, assert_reloads_identically: Callable[[EagerModel], None]
) -> None:
    slim = PruneLayers(ratio=0.5)(deep, Context(root=tmp_path / "slim"))
    assert_reloads_identically(slim)
    again = PruneLayers(remove=1)(slim, Context(root=tmp_path / "again"))
    assert len(again.load().blocks) == 2 and len(again.recipe.edits) == 2
    assert len(deep.load().blocks) == 5


def test_blocks_that_change_the_shape_stay(tmp_path: Path) -> None:
    model = sealed(tmp_path / "source", "Stages")
    slim = PruneLayers(remove=2)(model, Context(root=tmp_path / "slim"))
    facts = slim.manifest.facts
    assert len(slim.load().layer1) + len(slim.load().layer2) == 3
    assert facts["stayed"]["layer2.0"] == "its input has shape (2, 8) and its output (2, 12)"
    assert set(facts["stayed"]) == {"layer1.0", "layer2.0"}
    with pytest.raises(
        StageFailed, match=r"4 blocks are to be removed and 3 can be \(layer1.0: its"
    ):
        PruneLayers(keep=1)(model, Context(root=tmp_path / "none"))


def test_named_blocks_are_removed_without_a_search(deep: EagerModel, tmp_path: Path) -> None:
    searched = PruneLayers(remove=2)(deep, Context(root=tmp_path / "searched"))
    named = PruneLayers(blocks=("blocks.3", "blocks.1"))(deep, Context(root=tmp_path / "named"))
    facts = named.manifest.facts
    assert facts["removed"] == searched.manifest.facts["removed"] and not facts["harm_alone"]
    x = deep.signature.example(seed=3)
    assert torch.equal(named.load()(*x), searched.load()(*x))
    assert named.recipe == searched.recipe


@pytest.mark.parametrize(
    ("net", "names", "message"),
    [
        ("Deep", ["blocks.7"], "'blocks.7' is not a repeated block; these are: blocks.0, blocks.1"),
        ("Deep", [f"blocks.{i}" for i in range(5)], "blocks.4 cannot be removed with blocks.0, bl"),
        ("Stages", ["layer2.0"], "layer2.0 cannot be removed: its input has shape"),
        ("Indexed", ["blocks.0"], "blocks.0 cannot be removed: the model without it fails: Index"),
    ],
)
def test_named_blocks_that_have_to_stay_are_refused(
    net: str, names: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(StageFailed, match=message):
        PruneLayers(blocks=names)(sealed(tmp_path / "a", net), Context(root=tmp_path / "b"))


def test_a_forward_with_a_hard_coded_block_count_is_refused(tmp_path: Path) -> None:
    model = sealed(tmp_path / "source", "Indexed")
    with pytest.raises(StageFailed, match=r"blocks.0: the model without it fails: IndexError"):
        PruneLayers(remove=1)(model, Context(root=tmp_path / "slim"))
    assert not (tmp_path / "slim").exists()


def test_errors_are_metric_drops_if_there_are_targets(
    deep: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    context = Context(root=tmp_path / "slim", data=blobs)
    slim = PruneLayers(remove=1, exclude=("blocks.3", "blocks.[12]"))(deep, context)
    facts = slim.manifest.facts
    assert facts["judged_by"] == "metric" and "points" in facts["removed"][0]
    assert facts["stayed"]["blocks.1"] == "excluded by 'blocks.[12]'"
    before, after = context.score(deep), context.score(slim)
    assert facts["removed"][0]["points"] == pytest.approx(100 * (before - after), abs=1e-4)
    unlabelled = Splits({"val": TensorDataset(blobs.datasets["val"].tensors[0])})
    slim = PruneLayers(remove=1)(deep, Context(root=tmp_path / "other", data=unlabelled))
    assert slim.manifest.facts["judged_by"] == "outputs"
    with pytest.raises(StageFailed, match="needs a split 'val' with targets for accuracy"):
        PruneLayers(remove=1, judged_by="metric")(
            deep, Context(root=tmp_path / "none", data=unlabelled)
        )


def test_layers_behind_removed_blocks_are_refitted(
    deep: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    names = ("blocks.1", "blocks.3")
    cut, refitted = (
        PruneLayers(blocks=names, refit=refit)(
            deep, Context(root=tmp_path / str(refit), data=blobs)
        )
        for refit in (False, True)
    )
    x = blobs.datasets["val"].tensors[0]
    expected, far, near = (model.load()(x) for model in (deep, cut, refitted))
    assert (near - expected).norm() < 0.5 * (far - expected).norm()
    facts = refitted.manifest.facts["refit"]
    assert facts["output_error"]["refit"] < 0.25 * facts["output_error"]["cut"]
    # What runs before the first removed block is as it was.
    assert not any(name.startswith("blocks.0") for name in facts["layers"])
    assert torch.equal(refitted.load().blocks[0].first.weight, deep.load().blocks[0].first.weight)
    fewer = PruneLayers(blocks=names, refit=True, calibration_samples=10**6)
    with pytest.raises(
        PipelineInvalid, match="calibration_samples: 1000000 samples asked for and split"
    ):
        fewer(deep, Context(root=tmp_path / "none", data=blobs))


def test_it_learns_from_the_unpruned_model(deep: EagerModel, blobs: Splits, tmp_path: Path) -> None:
    x = {name: TensorDataset(split.tensors[0]) for name, split in blobs.datasets.items()}
    context = Context(root=tmp_path / "tuned", data=Splits(x))
    training = Finetune(epochs=2, batch_size=16, keep="last", teaching=Teaching(loss="mse"))
    stage = PruneLayers(keep=1, finetune=training)
    stage = stage.model_copy(update={"judged_by": "outputs"})
    with pytest.raises(StageFailed, match="needs targets and no sample has one"):
        stage(deep, context)
    train = Splits({"train": x["train"]})
    tuned = stage(deep, Context(root=tmp_path / "tuned", data=train))
    cut = PruneLayers(keep=1)(deep, Context(root=tmp_path / "cut", data=train))
    inputs = x["val"].tensors
    expected = deep.load()(*inputs)
    far, near = ((m.load()(*inputs) - expected).norm() for m in (cut, tuned))
    assert near < 0.8 * far
    assert tuned.parameters() == cut.parameters() < deep.parameters()
    assert tuned.manifest.facts["kept_epoch"] == 2


def test_wrong_input_is_refused(deep: EagerModel, mlp: EagerModel, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "slim")
    with pytest.raises(StageFailed, match="the model has no repeated blocks"):
        PruneLayers(remove=1)(mlp, context)
    with pytest.raises(StageFailed, match=r"ratio: 0.1 of 5 blocks removes none; 5 of them can"):
        PruneLayers(ratio=0.1)(deep, context)
    with pytest.raises(PipelineInvalid, match=r"prune_layers.exclude: no module matches 'block'"):
        PruneLayers(remove=1, exclude=("block",))(deep, context)
    with pytest.raises(StageFailed, match="needs data"):
        PruneLayers(remove=1, finetune=Training(epochs=1))(deep, context)
    with pytest.raises(ValueError, match="give one of remove, keep, ratio and blocks, found none"):
        PruneLayers()
    with pytest.raises(ValueError, match="calibration_samples are those of a refit"):
        PruneLayers(remove=1, calibration_samples=8)
    with pytest.raises(StageFailed, match="needs data"):
        PruneLayers(remove=1, refit=True)(deep, context)
    with pytest.raises(ValueError, match="exclude is for a search, and blocks names what is"):
        PruneLayers(blocks=("blocks.1",), exclude=("blocks.2",))


def test_a_gate_refuses_and_the_result_is_kept(deep: EagerModel, tmp_path: Path) -> None:
    stage = PruneLayers(remove=1, gates=(MaxParameters(ratio=0.1),))
    with pytest.raises(GateRefused, match="max_parameters"):
        stage(deep, Context(root=tmp_path / "slim"))
    assert EagerModel.from_directory(tmp_path / "slim").parameters() < deep.parameters()


SUPERVISED = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head, self.late = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        states = []
        for block in self.blocks:
            x = x + block(x)
            states.append(x)
        return (self.head(x), self.late(states[2])) if self.training else self.head(x)
"""


def test_a_block_that_training_needs_stays(tmp_path: Path) -> None:
    (tmp_path / "supervised.py").write_text(SUPERVISED)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="supervised:Net")
    model = import_checkpoint(
        tmp_path / "deep", recipe, signature, checkpoint=None, folder=tmp_path
    )
    with pytest.raises(StageFailed, match="without it fails in training: IndexError"):
        PruneLayers(remove=1)(model, Context(root=tmp_path / "slim"))
