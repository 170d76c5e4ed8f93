import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint.state_dict import zero_share
from compress.common.errors import GateRefused, StageFailed
from compress.common.forward import run_in_eval
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MinMetric
from compress.data.splits import DataReference, Splits
from compress.distillation.stage import Distill
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_weights import PruneWeights
from compress.pruning.pruning_stage import Finetune
from compress.training.config.training import Training
from compress.training.objectives.teacher_objective import Teaching
from compress.training.stage import Train

HERE = Path(__file__).parent
TRAINING = HERE.parent / "training"


def sealed(path: Path, net: str, *shape: int) -> EagerModel:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", *shape)),))
    recipe = Recipe(factory=f"pruning_weight_nets:{net}")
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=HERE)


@pytest.fixture
def wide(tmp_path: Path) -> EagerModel:
    return sealed(tmp_path / "wide", "wide", 4)


def shares(model: EagerModel) -> dict[str, float]:
    named = model.load().named_parameters()
    return {name: float((p == 0).double().mean()) for name, p in named}


def test_half_of_each_layer_is_zero_without_edits_in_the_recipe(
    wide: EagerModel, tmp_path: Path
) -> None:
    slim = PruneWeights(amount=0.5)(wide, Context(root=tmp_path / "slim"))
    assert shares(slim) == {"up.weight": 0.5, "up.bias": 0, "down.weight": 0.5, "down.bias": 0}
    before, after = wide.load(), slim.load()
    stays = after.up.weight != 0
    assert torch.equal(after.up.weight[stays], before.up.weight[stays])
    assert before.up.weight[~stays].abs().max() <= before.up.weight[stays].abs().min()
    assert slim.load().state_dict().keys() == wide.load().state_dict().keys()  # no masks
    facts = slim.manifest.facts
    assert facts["zeros"]["by_weight"] == {"up.weight": 0.5, "down.weight": 0.5}
    assert facts["zeros"]["all_weights"] == pytest.approx(112 / 259, abs=1e-6)
    assert "no faster" in facts["speed"] and slim.recipe.edits == ()
    packed = zlib.compress(b"".join(t.numpy().tobytes() for t in after.state_dict().values()))
    assert facts["deflated_bytes"]["after"] == pytest.approx(len(packed), abs=16)
    assert facts["deflated_bytes"]["after"] < 0.8 * facts["deflated_bytes"]["before"]


def test_outputs_are_identical_in_another_process(
    wide: EagerModel,
    blobs: Splits,
    tmp_path: Path,
    assert_reloads_identically: Callable[[EagerModel], None],
) -> None:
    stage = PruneWeights(amount=0.6, method="sparsegpt", calibration_samples=100)
    slim = stage(wide, Context(root=tmp_path / "slim", data=blobs))
    assert_reloads_identically(slim)


@pytest.mark.slow
def test_calibrated_methods_have_less_error(digits: Splits, tmp_path: Path) -> None:
    model = sealed(tmp_path / "source", "Many", 1, 8, 8)
    x = next(digits.batches("val")).inputs
    before = run_in_eval(model.load(), x)[0]
    errors = {}
    for method in ("random", "wanda", "sparsegpt"):
        stage = PruneWeights(pattern="2:4", method=method, exclude=("head",))
        slim = stage(model, Context(root=tmp_path / method, data=digits))
        assert slim.manifest.facts["zeros"]["by_weight"] == {"grouped.weight": 0.5, "raw": 0.5}
        assert slim.manifest.facts["left"]["head.weight"] == "excluded"
        assert "semi_structured" in slim.manifest.facts["speed"]
        errors[method] = float((run_in_eval(slim.load(), x)[0] - before).norm())
    assert errors["sparsegpt"] < 0.7 * errors["wanda"] < 0.7 * errors["random"]


def test_all_weights_are_ranked_together(wide: EagerModel, tmp_path: Path) -> None:
    slim = PruneWeights(amount=0.5, scope="global")(wide, Context(root=tmp_path / "slim"))
    found = shares(slim)
    assert found["up.weight"] < 0.4 < 0.6 < found["down.weight"]  # whose weights are smaller
    assert slim.manifest.facts["zeros"]["pruned_weights"] == 0.5


def test_random_zeros_follow_the_seed(wide: EagerModel, tmp_path: Path) -> None:
    stage = PruneWeights(amount=0.5, method="random")
    made = [
        stage(wide, Context(root=tmp_path / str(i), seed=seed)).load().up.weight
        for i, seed in enumerate((1, 1, 2))
    ]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


@pytest.mark.parametrize("more", [{}, {"schedule": "cubic", "updates": 5}, {"pattern": "2:4"}])
def test_zeros_stay_through_finetuning(
    wide: EagerModel, blobs: Splits, tmp_path: Path, more: dict
) -> None:
    training = Training(epochs=4, batch_size=16, learning_rate=0.2, clip_norm=1.0)
    amount = {} if more.get("pattern") else {"amount": 0.75}
    stage = PruneWeights(finetune=training, include=("up",), **amount, **more)
    context = Context(root=tmp_path / "tuned", data=blobs)
    tuned = stage(wide, context)
    assert shares(tuned)["up.weight"] == (0.5 if more.get("pattern") else 0.75)
    assert shares(tuned)["down.weight"] == 0
    facts = tuned.manifest.facts
    assert facts["zeros"]["by_weight"]["up.weight"] == shares(tuned)["up.weight"]
    assert context.score(tuned) > 0.9
    gradual = "schedule" in more
    assert facts["history"][0]["epoch"] == (1 if gradual else 0)
    assert facts["kept_epoch"] >= (3 if gradual else 1)  # until 0.75 of 4 epochs zeros were made


def test_an_epoch_without_all_zeros_is_not_kept(
    mlp: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    context = Context(root=tmp_path / "good", data=blobs)
    good = Train(epochs=4, batch_size=16)(mlp, context)
    barely = Training(epochs=4, batch_size=16, learning_rate=1e-6)
    stage = PruneWeights(amount=0.95, finetune=barely, schedule="linear", updates=3)
    poor = stage(good, context.with_root(tmp_path / "poor"))
    history = poor.manifest.facts["history"]
    assert history[0]["metric"] > 0.9 > history[-1]["metric"]
    assert poor.manifest.facts["kept_epoch"] >= 3
    assert shares(poor)["0.weight"] == pytest.approx(0.95, abs=0.01)


def test_averaged_weights_keep_their_zeros(wide: EagerModel, blobs: Splits, tmp_path: Path) -> None:
    training = Finetune(epochs=2, batch_size=16, ema_decay=0.9, keep="last", teaching=Teaching())
    stage = PruneWeights(amount=0.5, finetune=training)
    tuned = stage(wide, Context(root=tmp_path / "tuned", data=blobs))
    assert shares(tuned)["up.weight"] == shares(tuned)["down.weight"] == 0.5


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("schedule", ["one_shot", pytest.param("linear", marks=pytest.mark.slow)])
def test_a_resumed_training_has_the_same_zeros(
    wide: EagerModel, blobs: Splits, tmp_path: Path, schedule: str
) -> None:
    training = Training(epochs=4, batch_size=16, keep="last")
    stage = PruneWeights(amount=0.5, finetune=training, schedule=schedule)
    whole = stage(wide, Context(root=tmp_path / "whole", data=blobs))

    def stop(task: str, done: int, total: int, note: str = "") -> None:
        if task == "prune_weights" and done == 2:
            raise Interrupted

    context = Context(root=tmp_path / "resumed", data=blobs)
    with pytest.raises(StageFailed, match="Interrupted"):
        stage(wide, replace(context, progress=stop))
    resumed = stage(wide, context)
    assert shares(resumed)["up.weight"] == 0.5
    for a, b in zip(whole.load().parameters(), resumed.load().parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_two_processes_keep_the_zeros_of_one(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))
    recipe = Recipe(factory="nets:plain")
    model = import_checkpoint(
        tmp_path / "source", recipe, signature, checkpoint=None, folder=TRAINING
    )
    data = DataReference("nets:blobs", {}, TRAINING, 16).load()
    found = []
    for processes in (1, 2):
        training = Training(epochs=2, batch_size=16, keep="last", parallel={"processes": processes})
        stage = PruneWeights(amount=0.5, finetune=training, schedule="cubic")
        found.append(stage(model, Context(root=tmp_path / f"by{processes}", data=data)).load())
    for (name, one), two in zip(found[0].named_parameters(), found[1].parameters(), strict=True):
        assert torch.equal(one == 0, two == 0), name
        torch.testing.assert_close(one, two)
        assert one.dim() < 2 or (one == 0).double().mean() == pytest.approx(0.5, abs=0.02)


def test_a_gate_refuses_and_the_result_is_kept(
    wide: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    stage = PruneWeights(amount=0.9, gates=(MinMetric(at=0.99),))
    with pytest.raises(GateRefused, match="min_metric"):
        stage(wide, Context(root=tmp_path / "slim", data=blobs))
    assert shares(EagerModel.from_directory(tmp_path / "slim"))["up.weight"] == pytest.approx(
        0.9, abs=0.01
    )


def test_wrong_input_is_refused(wide: EagerModel, blobs: Splits, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "slim")
    with pytest.raises(StageFailed, match=r"can be set to zero \(up.weight: excluded"):
        PruneWeights(amount=0.5, exclude=("*",))(wide, context)
    with pytest.raises(StageFailed, match="prune_weights needs data"):
        PruneWeights(amount=0.5, method="wanda")(wide, context)
    other = Splits({"train": TensorDataset(torch.zeros(9, 5))})
    with pytest.raises(StageFailed, match=r"does not take the calibration samples.*\(8, 5\)"):
        PruneWeights(amount=0.5, method="wanda", calibration_samples=8)(
            wide, Context(root=tmp_path / "slim", data=other)
        )
    assert not (tmp_path / "slim").exists()


TUNED = {"finetune": {"epochs": 1}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "amount is missing"),
        ({"amount": 0.5, "pattern": "2:4"}, "says how many zeros; leave out amount"),
        ({"pattern": "4:4"}, "leaves 4 of 4; fewer must be left"),
        ({"pattern": "half"}, "should match pattern"),
        ({"pattern": "2:4", "scope": "global"}, "scope: global is for pattern: unstructured"),
        ({"amount": 0.5, "method": "wanda", "scope": "global"}, "ranks within layers"),
        ({"amount": 0.5, "schedule": "cubic"}, "schedule is for fine-tuning"),
        ({"amount": 0.5, "schedule": "cubic", "method": "wanda", **TUNED}, "use method: l1"),
        (
            {"amount": 0.5, "schedule": "cubic", "finetune": {"epochs": 1, "ema_decay": 0.9}},
            r"finetune.ema_decay does not go with schedule: cubic",
        ),
        (
            {"amount": 0.5, "finetune": {"epochs": 1, "parallel": {"strategy": "fsdp"}}},
            "found strategy: fsdp, expected strategy: ddp",
        ),
        (
            {"amount": 0.5, "finetune": {"epochs": 1, "parallel": {"tensor": 2, "processes": 2}}},
            "found tensor or pipeline",
        ),
    ],
)
def test_wrong_combinations_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PruneWeights.model_validate(settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor is in prototype")
def test_sparse_kernels_take_the_pattern(tmp_path: Path) -> None:
    from torch.sparse import to_sparse_semi_structured

    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 128)),))
    source = import_checkpoint(
        tmp_path / "source",
        Recipe(factory="pruning_weight_nets:square"),
        signature,
        checkpoint=None,
        folder=HERE,
    )
    slim = PruneWeights(pattern="2:4")(source, Context(root=tmp_path / "slim", device="cuda"))
    weight = slim.load("cuda").half().weight.detach()
    x = torch.randn(64, 128, device="cuda", dtype=torch.half)
    sparse = to_sparse_semi_structured(weight)
    torch.testing.assert_close(sparse.to_dense(), weight)
    torch.testing.assert_close(
        torch.nn.functional.linear(x, sparse), torch.nn.functional.linear(x, weight),
        rtol=1e-2, atol=1e-2,
    )  # fmt: skip


LATER = {
    "train": Train(epochs=2, keep="last"),
    "distill": Distill(teacher="source", epochs=2, keep="last"),
    "prune_channels": PruneChannels(ratio=0.25, round_to=1, finetune={"epochs": 2, "keep": "last"}),
}


@pytest.mark.parametrize("later", LATER)
def test_later_stages_keep_the_zeros(wide: EagerModel, blobs: Splits, tmp_path, later) -> None:
    slim = PruneWeights(amount=0.5)(wide, Context(root=tmp_path / "slim"))
    context = Context(root=tmp_path / "later", data=blobs, artifacts={"source": wide})
    trained = LATER[later](slim, context)
    before, after = slim.load(), trained.load()
    assert not torch.equal(after.down.bias, before.down.bias)
    if later == "prune_channels":
        assert zero_share(after.state_dict()) >= 0.4
    else:
        assert torch.equal(after.up.weight == 0, before.up.weight == 0)
    assert "warnings" not in trained.manifest.facts
    dense = Train(epochs=1, keep="last")(wide, Context(root=tmp_path / "dense", data=blobs))
    assert not dense.has_pruned_weights


def test_zeros_that_are_gone_are_warned_of(wide: EagerModel, tmp_path: Path) -> None:
    slim = PruneWeights(amount=0.5)(wide, Context(root=tmp_path / "slim"))
    module = slim.load()
    for weight in (module.up.weight, module.down.weight):
        weight.data += 1.0
    (warning,) = slim.derive(tmp_path / "dense", module).manifest.facts["warnings"]
    assert warning.startswith("most pruned weights are zero no more: 50.0% before, ")


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_zeros_of_an_imported_checkpoint_that_are_gone_are_warned_of(
    wide: EagerModel, blobs: Splits, tmp_path: Path, share: float
) -> None:
    module = wide.load()
    for weight in (module.up.weight, module.down.weight):
        weight.data[torch.rand(weight.shape) < share] = 0
    imported = EagerModel.from_module(module, signature=wide.signature)
    trained = Train(epochs=1, keep="last")(imported, Context(root=tmp_path / "t", data=blobs))
    warnings = trained.manifest.facts.get("warnings", [])
    assert [w.startswith("most pruned weights are zero no more: ") for w in warnings] == (
        [True] if share else []
    )
