from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MaxParameters
from compress.data.splits import Splits
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_weights import PruneWeights
from compress.pruning.recovery.recovery import reestimate_batch_norms_
from compress.training.config.training import Training
from compress.training.stage import Train

HERE = Path(__file__).parent
DIGITS = Path(__file__).parents[3] / "examples" / "digits"


def sealed(
    path: Path, factory: str, shape: tuple[int, ...], folder: Path, **arguments: int
) -> EagerModel:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", *shape)),))
    recipe = Recipe(factory=factory, arguments=arguments)
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=folder)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    root = tmp_path_factory.mktemp("resnet") / "source"
    sizes = {"blocks": 1, "width": 32, "classes": 10}
    return sealed(root, "models:ResNet", (1, 8, 8), DIGITS, **sizes)


@pytest.fixture(scope="module")
def pruned(resnet: EagerModel) -> EagerModel:
    context = Context(root=resnet.path.with_name("pruned"))
    return PruneChannels(ratio=0.5)(resnet, context)


def test_half_the_channels_are_a_quarter_of_the_parameters(
    resnet: EagerModel, pruned: EagerModel
) -> None:
    assert pruned.parameters() / resnet.parameters() == pytest.approx(0.25, abs=0.01)
    assert pruned.macs() / resnet.macs() == pytest.approx(0.25, abs=0.01)
    assert pruned.payload_bytes < 0.27 * resnet.payload_bytes
    assert len(pruned.manifest.facts["families"]) == 6
    assert pruned.manifest.facts["families"][1] == {
        "modules": ["layers.0.conv1"],
        "before": 32,
        "after": 16,
    }
    assert pruned.manifest.facts["pinned"] == {"head": "it is an output of the model"}
    assert pruned.manifest.lineage[-1].stage == "prune_channels"


def test_outputs_are_identical_in_another_process(
    pruned: EagerModel, assert_reloads_identically: Callable[[EagerModel], None]
) -> None:
    assert_reloads_identically(pruned)


@pytest.mark.slow
def test_a_pruned_model_is_pruned_again(pruned: EagerModel, tmp_path: Path) -> None:
    again = PruneChannels(ratio=0.5, round_to=4)(pruned, Context(root=tmp_path / "again"))
    assert len(again.recipe.edits) == 2
    assert again.load().layers[0].conv1.weight.shape == (8, 8, 3, 3)


def test_the_input_is_not_touched(pruned: EagerModel, resnet: EagerModel) -> None:
    resnet.verify()
    assert resnet.load().conv.out_channels == 32
    assert pruned.load().conv.out_channels == 16


def test_heads_are_written_into_the_recipe(tmp_path: Path) -> None:
    source = sealed(tmp_path / "source", "pruning_linear_nets:Attention", (5, 16), HERE)
    slim = PruneChannels(ratio=0.5)(source, Context(root=tmp_path / "slim"))
    assert slim.recipe.edits[0].attributes == {"heads": 2, "key_heads": 2}
    assert slim.load().heads == 2


def test_finetuning_is_kept_where_it_helps(mlp: EagerModel, blobs: Splits, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "tuned", data=blobs)
    cut = PruneChannels(ratio=0.5)(mlp, context.with_root(tmp_path / "cut"))
    tuned = PruneChannels(ratio=0.5, finetune=Training(epochs=3, batch_size=16))(mlp, context)
    assert tuned.parameters() == cut.parameters() < mlp.parameters()
    assert context.score(tuned) > max(0.9, context.score(cut))
    assert len(tuned.recipe.edits) == 1
    assert len(tuned.manifest.facts["history"]) >= 3


def test_finetuning_without_data_is_refused(mlp: EagerModel, tmp_path: Path) -> None:
    stage = PruneChannels(ratio=0.5, finetune=Training(epochs=1))
    assert stage.needs_data and not PruneChannels(ratio=0.5).needs_data
    with pytest.raises(StageFailed, match="needs data"):
        stage(mlp, Context(root=tmp_path / "tuned"))
    assert not (tmp_path / "tuned").exists()


@pytest.mark.slow
def test_statistics_are_averaged_anew(
    resnet: EagerModel, pruned: EagerModel, digits: Splits, tmp_path: Path
) -> None:
    stage = PruneChannels(ratio=0.5, calibration_samples=120, refit=False)
    repaired = stage(resnet, Context(root=tmp_path / "repaired", data=digits))
    before, after = pruned.load(), repaired.load()
    assert torch.equal(before.conv.weight, after.conv.weight)
    assert not torch.equal(before.bn.running_mean, after.bn.running_mean)
    batch = next(digits.calibration(120, seed=0))
    mean = after.conv(batch.inputs[0]).mean((0, 2, 3))
    torch.testing.assert_close(after.bn.running_mean, mean)
    assert after.bn.momentum == 0.1 and not after.bn.training


def test_statistics_stay_without_usable_batches(resnet: EagerModel, digits: Splits) -> None:
    module = resnet.load()
    before = module.bn.running_mean.clone()
    reestimate_batch_norms_(module, digits.batches("val", batch_size=1, limit=2))
    assert torch.equal(module.bn.running_mean, before)


def test_data_that_do_not_fit_are_refused_in_one_line(
    resnet: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    stage = PruneChannels(ratio=0.5, calibration_samples=32)
    refused = r"does not take the calibration samples, a batch of shape \(4, 4\): RuntimeError: .*"
    with pytest.raises(StageFailed, match=refused) as caught:
        stage(resnet, Context(root=tmp_path / "slim", data=blobs))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "slim").exists()


@pytest.mark.parametrize(
    "stage",
    [
        PruneChannels(ratio=0.5, refit=True),
        PruneChannels(ratio=0.5, importance="obs"),
        PruneWeights(amount=0.5, method="wanda"),
    ],
    ids=["refit", "obs", "wanda"],
)
def test_samples_come_in_the_one_batch_size_that_a_model_takes(stage, tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=(3, 4)),))
    recipe = Recipe(factory="pruning_nets:ThreeRows")
    model = import_checkpoint(tmp_path / "in", recipe, signature, checkpoint=None, folder=HERE)
    data = Splits({"train": [(torch.randn(4), 0) for _ in range(64)]}, batch_size=16)
    pruned = stage(model, Context(root=tmp_path / "out", data=data))
    assert pruned.load()(torch.ones(3, 4)).shape == (3, 2)


def test_random_channels_follow_the_seed(mlp: EagerModel, tmp_path: Path) -> None:
    stage = PruneChannels(ratio=0.5, importance="random")
    kept = [
        stage(mlp, Context(root=tmp_path / str(i), seed=seed)).recipe.edits[0].kept
        for i, seed in enumerate((1, 1, 2))
    ]
    assert kept[0] == kept[1] != kept[2]


def test_facts_name_the_weights_of_the_outermost_module(tmp_path: Path) -> None:
    source = sealed(tmp_path / "source", "pruning_nets:Raw", (1, 8, 8), HERE)
    slim = PruneChannels(ratio=0.5)(source, Context(root=tmp_path / "slim"))
    assert slim.manifest.facts["families"] == [{"modules": ["kernel"], "before": 16, "after": 8}]


def test_nothing_to_remove_says_why(tmp_path: Path) -> None:
    source = sealed(tmp_path / "source", "pruning_linear_nets:Everything", (4,), HERE)
    with pytest.raises(StageFailed, match=r"no channel can be removed \(only: it is an output"):
        PruneChannels(ratio=0.5)(source, Context(root=tmp_path / "slim"))
    assert not (tmp_path / "slim").exists()


def test_a_misspelt_pattern_is_refused(mlp: EagerModel, tmp_path: Path) -> None:
    with pytest.raises(PipelineInvalid, match=r"exclude: no module matches '5'; did you mean '0'"):
        PruneChannels(ratio=0.5, exclude=("5",))(mlp, Context(root=tmp_path / "slim"))


def test_a_gate_refuses_and_the_result_is_kept(mlp: EagerModel, tmp_path: Path) -> None:
    stage = PruneChannels(ratio=0.5, gates=(MaxParameters(ratio=0.1),))
    with pytest.raises(GateRefused, match="max_parameters"):
        stage(mlp, Context(root=tmp_path / "slim"))
    assert EagerModel.from_directory(tmp_path / "slim").parameters() < mlp.parameters()


def test_settings_are_read_without_torch(fresh_process: Callable[[str], str]) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from compress.pruning.prune_channels import PruneChannels\n"
        "PruneChannels(ratio=0.5); print('torch' in sys.modules)"
    )
    assert fresh_process(code) == "False"


AUXILIARY = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 16), nn.Linear(16, 16)
        self.head, self.auxiliary = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.one(x).relu()
        logits = self.head(self.two(hidden).relu())
        return (logits, self.auxiliary(hidden)) if self.training else logits
"""


def test_channels_read_by_a_training_only_head_stay(tmp_path: Path, blobs: Splits) -> None:
    (tmp_path / "auxiliary.py").write_text(AUXILIARY)
    model = sealed(tmp_path / "source", "auxiliary:Net", (4,), tmp_path)
    tuned = PruneChannels(ratio=0.5, finetune={"epochs": 1, "batch_size": 24})(
        model, Context(root=tmp_path / "pruned", data=blobs)
    )
    facts = tuned.manifest.facts
    assert [family["modules"] for family in facts["families"]] == [["two"]]
    assert facts["pinned"]["one"].startswith("the smaller model fails in training: RuntimeError")
    trained = Train(epochs=1, batch_size=24)(tuned, Context(root=tmp_path / "train", data=blobs))
    assert trained.parameters() == tuned.parameters() < model.parameters()
