"""The stage's settings: what is refused, what needs data, and what each of them does."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.forward import run_in_eval
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.data.splits import Splits
from compress.pruning.channel_pruner import ChannelPruner, compose_kept
from compress.pruning.channel_settings import Target
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.pruning_stage import Finetune
from compress.training.config.training import Training

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    """Return a trained-like network of 4 features with three groups."""
    root = tmp_path_factory.mktemp("wide")
    (root / "widenet.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "def wide():\n    torch.manual_seed(3)\n"
        "    sizes = [(4, 64), (64, 48), (48, 32), (32, 3)]\n"
        "    layers = [p for s in sizes for p in (nn.Linear(*s), nn.ReLU())]\n"
        "    for layer in layers[::2]:\n"
        "        nn.init.orthogonal_(layer.weight, gain=1.4)\n"
        "        nn.init.zeros_(layer.bias)\n"
        "    return nn.Sequential(*layers[:-1])\n"
    )
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    return import_checkpoint(
        root / "source", Recipe(factory="widenet:wide"), signature, checkpoint=None, folder=root
    )


def unlabelled(splits: Splits) -> Splits:
    bare = {name: TensorDataset(split.tensors[0]) for name, split in splits.datasets.items()}
    return Splits(bare, batch_size=32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs one of ratio, target and widths, found none"),
        ({"ratio": 0.5, "target": {"macs": 0.5}}, "found ratio and target; keep one"),
        ({"target": {}}, "exactly one of macs, parameters and latency, found none"),
        ({"target": {"macs": 0.5, "latency": 0.5}}, "found macs and latency"),
        ({"target": {"macs": 0.5, "batch": 8}}, "target.batch is for latency"),
        ({"ratio": 0.5, "max_ratio": 0.9}, "max_ratio is for scope: global, isomorphic"),
        ({"ratio": 0.9, "scope": "global"}, "ratio 0.9 is above max_ratio 0.8"),
        ({"ratio": 0.5, "refit": True, "calibration_samples": 0}, "refit needs samples"),
        ({"ratio": 0.5, "importance": "obs", "calibration_samples": 0}, "importance: obs needs"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PruneChannels(**settings)


def test_settings_that_need_data_are_refused_without(wide: EagerModel, tmp_path: Path) -> None:
    assert not PruneChannels(ratio=0.5).needs_data and PruneChannels(ratio=0.5).uses_data
    assert PruneChannels(ratio=0.5, calibration_samples=0).uses_data, "cuts are proven on it"
    for settings in ({"refit": True}, {"importance": "wanda"}, {"calibration_samples": 8}):
        stage = PruneChannels(ratio=0.5, **settings)
        name = next(iter(settings))
        with pytest.raises(StageFailed, match="prune_channels needs data"):
            stage(wide, Context(root=tmp_path / name))
    with pytest.raises(PipelineInvalid, match=r"500 samples asked for .* has 120"):
        few = Splits({"train": TensorDataset(torch.randn(120, 4))})
        stage = PruneChannels(ratio=0.5, calibration_samples=500)
        stage(wide, Context(root=tmp_path / "few", data=few))


def test_a_refit_reduces_the_output_error_and_reports_it(
    wide: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    context = Context(root=tmp_path / "refit", data=unlabelled(blobs))
    slim = PruneChannels(ratio=0.5)(wide, context)
    refit = slim.manifest.facts["refit"]
    assert refit["samples"] == 120  # all there are
    assert set(refit["layers"]) == {"2.weight", "4.weight", "6.weight"}
    assert refit["output_error"]["refit"] < 0.2 * refit["output_error"]["cut"]
    plain = PruneChannels(ratio=0.5, refit=False)(wide, context.with_root(tmp_path / "plain"))
    x = blobs.datasets["test"].tensors[0]
    answers = [run_in_eval(m.load(), (x,))[0] for m in (wide, plain, slim)]
    assert (answers[2] - answers[0]).norm() < 0.5 * (answers[1] - answers[0]).norm()


def test_facts_list_removed_channels_and_costs(wide: EagerModel, tmp_path: Path) -> None:
    slim = PruneChannels(ratio=0.5, exclude=("4",))(wide, Context(root=tmp_path / "slim"))
    facts = slim.manifest.facts
    assert facts["families"] == [
        {"modules": ["0"], "before": 64, "after": 32},
        {"modules": ["2"], "before": 48, "after": 32},
    ]
    assert facts["pinned"] == {"6": "it is an output of the model", "4": "excluded by '4'"}
    weights = 4 * 64 + 64 * 48 + 48 * 32 + 32 * 3
    left = 4 * 32 + 32 * 32 + 32 * 32 + 32 * 3
    assert facts["macs"] == {"before": weights, "after": left}
    biases = 48 + 32 + 3
    assert facts["parameters"] == {"before": weights + 64 + biases, "after": left + 32 * 3 + 3}
    assert "refit" not in facts


@pytest.mark.parametrize("importance", ["taylor", "hessian", "wanda", "obs"])
def test_every_criterion_prunes_with_and_without_labels(
    wide: EagerModel, blobs: Splits, tmp_path: Path, importance: str
) -> None:
    stage = PruneChannels(ratio=0.5, importance=importance, calibration_samples=64)
    kept = []
    for name, data in (("labelled", blobs), ("bare", unlabelled(blobs))):
        slim = stage(wide, Context(root=tmp_path / name, data=data))
        assert slim.parameters() < 0.5 * wide.parameters()
        kept.append(slim.recipe.edits[0].kept)
    looks_at_labels = importance in ("taylor", "hessian")
    assert (kept[0] != kept[1]) == looks_at_labels


@pytest.mark.parametrize("quantity", ["macs", "parameters"])
def test_a_target_is_what_remains(wide: EagerModel, tmp_path: Path, quantity: str) -> None:
    stage = PruneChannels(target=Target(**{quantity: 0.4}), round_to=4, scope="global")
    slim = stage(wide, Context(root=tmp_path / "slim"))
    assert slim.manifest.facts[quantity]["before"] * 0.38 < slim.manifest.facts[quantity]["after"]
    assert slim.manifest.facts[quantity]["after"] <= slim.manifest.facts[quantity]["before"] * 0.4
    assert slim.macs() == slim.manifest.facts["macs"]["after"]


@pytest.mark.slow
def test_a_target_of_latency_is_measured_on_whole_models(
    wide: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def latency(pruner: ChannelPruner, module: torch.nn.Module, batch: int) -> float:
        asked.append(batch)
        return sum(p.numel() for p in module.parameters()) / wide.parameters()

    monkeypatch.setattr(ChannelPruner, "_latency", latency)
    stage = PruneChannels(target=Target(latency=0.5, batch=8), round_to=1)
    slim = stage(wide, Context(root=tmp_path / "slim"))
    assert 0.45 < slim.parameters() / wide.parameters() <= 0.5
    assert set(asked[:-1]) == {8} and len(asked) <= 7


def test_a_model_that_is_not_faster_logs_a_warning(
    wide: EagerModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for ratio in (0.7, 1.2):
        compared = SimpleNamespace(share=ratio)
        monkeypatch.setattr(
            ChannelPruner, "_compare_latency", lambda *_, found=compared, **__: found
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            PruneChannels(ratio=0.5)(wide, Context(root=tmp_path / str(ratio)))
        warned = [r.getMessage() for r in caplog.records if "compress" in r.name]
        assert bool(warned) == (ratio > 1)
    assert "not faster here: 1.20 of the time" in warned[0]


def test_latency_is_relative_to_the_unpruned_model(wide: EagerModel, tmp_path: Path) -> None:
    pruner = ChannelPruner(PruneChannels(ratio=0.5), wide, Context(root=tmp_path / "slim"))
    slow = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(400)))
    assert pruner._latency(slow, batch=1) > 5


@pytest.mark.slow
def test_a_teacher_teaches_without_labels(wide: EagerModel, blobs: Splits, tmp_path: Path) -> None:
    data = unlabelled(blobs)
    finetune = Finetune(epochs=2, batch_size=8, teaching={"hard_weight": 0})
    stage = PruneChannels(ratio=0.75, refit=False, finetune=finetune)
    context = Context(
        root=tmp_path / "taught", data=data, metric=Metric("fidelity"), artifacts={"source": wide}
    )
    cut = stage.model_copy(update={"finetune": None})(wide, context.with_root(tmp_path / "cut"))
    taught = stage(wide, context)
    assert context.score(taught) > context.score(cut)
    with pytest.raises(StageFailed, match="a loss needs targets"):
        stage.model_copy(update={"finetune": Finetune(epochs=1)})(wide, context)


def test_finetune_accepts_plain_training_settings() -> None:
    stage = PruneChannels(ratio=0.5, finetune=Training(epochs=2, momentum=0.5))
    assert isinstance(stage.finetune, Finetune)
    assert (stage.finetune.epochs, stage.finetune.momentum) == (2, 0.5)


def test_settings_are_recorded_in_the_order_that_digests_have() -> None:
    # Classes that the stage inherits from come first: their order is that of the manifest's bytes.
    recorded = list(PruneChannels(ratio=0.5).own_settings())
    assert recorded[:5] == ["stage", "ratio", "target", "widths", "importance"]
    assert recorded[-5:] == [
        "on_unverified",
        "iterations",
        "refit",
        "calibration_samples",
        "finetune",
    ]


def test_on_unverified_error_fails_the_stage(tmp_path: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="pruning_linear_nets:HiddenWidth")
    source = import_checkpoint(tmp_path / "source", recipe, signature, checkpoint=None, folder=HERE)
    context = Context(root=tmp_path / "slim")
    slim = PruneChannels(ratio=0.5)(source, context)
    assert "masked twin" in slim.manifest.facts["pinned"]["first"]
    with pytest.raises(StageFailed, match="the slice of 'first' cannot be verified"):
        PruneChannels(ratio=0.5, on_unverified="error")(
            source, replace(context, root=tmp_path / "strict")
        )


def test_slices_in_turn_compose_to_one() -> None:
    first = {"a": {0: (1, 3, 5, 7), 1: (0, 2)}}
    second = {"a": {0: (0, 3)}, "b": {1: (4,)}}
    assert compose_kept(first, second) == {"a": {0: (1, 7), 1: (0, 2)}, "b": {1: (4,)}}


def test_widths_say_how_many_channels_of_each_group_stay(wide: EagerModel, tmp_path: Path) -> None:
    slim = PruneChannels(widths={"0": 40, "4": 17})(wide, Context(root=tmp_path / "slim"))
    assert slim.manifest.facts["families"] == [
        {"modules": ["0"], "before": 64, "after": 40},
        {"modules": ["4"], "before": 32, "after": 17},
    ]
    steps = PruneChannels(widths={"0": 40}, iterations=2)
    twice = steps(wide, Context(root=tmp_path / "twice"))
    assert twice.manifest.facts["families"] == [{"modules": ["0"], "before": 64, "after": 40}]


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"1": 8}, "no group of channels is named '1'; did you mean"),
        ({"0": 65}, "'0' has 64 channels, found 65"),
        ({"6": 2}, "the channels of '6' stay: it is an output of the model"),
    ],
)
def test_widths_that_do_not_fit_are_refused(
    widths: dict[str, int], message: str, wide: EagerModel, tmp_path: Path
) -> None:
    with pytest.raises(PipelineInvalid, match=message):
        PruneChannels(widths=widths)(wide, Context(root=tmp_path / "slim"))
