"""A target of latency where it is known what serves: solved, measured, corrected, solved again."""

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.progress import silent
from compress.data.splits import Splits
from compress.profiling.benchmark import MeasuredShare
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.channel_pruner import ChannelPruner, parameters_of
from compress.pruning.channel_settings import ChannelSelection, Target
from compress.pruning.depth.block_search import OutputErrorMeter
from compress.pruning.latency import widths as latency_target
from compress.pruning.latency.widths import WidthSpace, measure_loss_increases
from compress.pruning.prune_channels import PruneChannels

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
WHOLE = {"0": 32, "3": 48}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    folder = tmp_path_factory.mktemp("latency")
    (folder / "latencynet.py").write_text(NET)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="latencynet:net")
    return import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=folder)


def share_of(widths: dict[str, int]) -> float:
    """A latency that is known, as those of a machine vary: what 4 → a → b → 3 multiplies."""
    a, b = widths["0"], widths["3"]
    return (4 * a + a * b + 3 * b) / (4 * 32 + 32 * 48 + 3 * 48)


@dataclass
class KnownLatency:
    """Serves with known latencies, and predicts them too low by a factor."""

    name: str = "a runtime"
    too_low: float = 1.0
    measured: list[dict[str, int]] = field(default_factory=list)

    @contextmanager
    def tables(self, model, whole, grid, variants, context, batch):
        assert whole == WHOLE and batch == 2
        self.predicted = InteractionSum(1.0 / self.too_low, self._terms(grid))
        yield self

    def _terms(self, grid):
        def change(a: int, b: int) -> float:
            return (share_of({"0": a, "3": b}) - 1) / self.too_low

        first, second = grid["0"][1:], grid["3"][1:]
        return {
            ("0",): {(a,): change(a, 48) for a in first},
            ("3",): {(b,): change(32, b) for b in second},
            ("0", "3"): {
                (a, b): change(a, b) - change(a, 48) - change(32, b)
                for a, b in product(first, second)
            },
        }

    def measure(self, pruned: EagerModel) -> MeasuredShare:
        module = pruned.load()
        self.measured.append({name: len(module[int(name)].weight) for name in WHOLE})
        return MeasuredShare(share=share_of(self.measured[-1]), unpruned_ms=2.0, ms=1.0)


def prune(model: EagerModel, context: Context, latency: float, **settings) -> EagerModel:
    target = Target(latency=latency, batch=2)
    return PruneChannels(target=target, round_to=8, **settings)(model, context)


def widths_of(pruned: EagerModel) -> dict[str, int]:
    module = pruned.load()
    return {name: len(module[int(name)].weight) for name in WHOLE}


def least_harm(model: EagerModel, context: Context, most: float) -> dict[str, int]:
    """Try all widths of the grid."""
    space = WidthSpace.from_model(model, context, ChannelSelection(round_to=8), values=5)
    meter = OutputErrorMeter(model.load(), model.signature, context, "outputs")
    loss_increases = measure_loss_increases(
        space, silent, lambda m: meter.measure(m).distance ** 2, {}, lambda: None, float("inf")
    )
    allowed = (
        dict(zip(space.grid, widths, strict=True)) for widths in product(*space.grid.values())
    )
    reached = [widths for widths in allowed if share_of(widths) <= most]
    return min(reached, key=lambda widths: sum(loss_increases[g][w] for g, w in widths.items()))


@pytest.mark.parametrize(
    ("latency", "too_low"), [(0.7, 1.5), pytest.param(0.3, 1.0, marks=pytest.mark.soak)]
)
def test_the_widths_of_least_harm_are_found_though_predictions_are_off(
    model: EagerModel, blobs: Splits, tmp_path: Path, latency: float, too_low: float
) -> None:
    served = KnownLatency(too_low=too_low)
    context = Context(root=tmp_path / "slim", data=blobs, served_latency=served)
    slim = prune(model, context, latency)
    widths = widths_of(slim)
    assert widths == least_harm(model, context, 0.99 * latency)
    assert widths in served.measured
    assert len(served.measured) == (1 if too_low == 1 else 2), "one measurement corrects"
    assert slim.manifest.facts["latency"] == {
        "runtime": "a runtime",
        "batch": 2,
        "target": latency,
        "predicted": pytest.approx(share_of(widths) / too_low, rel=1e-3),
        "measured": pytest.approx(share_of(widths), rel=1e-3),
        "ms": 1.0,
        "unpruned_ms": 2.0,
        "models_measured": len(served.measured),
    }


@pytest.mark.slow
def test_steps_lead_to_the_same_widths(model: EagerModel, blobs: Splits, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "once", data=blobs, served_latency=KnownLatency())
    expected = widths_of(prune(model, context, 0.3))
    slim = prune(model, context.with_root(tmp_path / "twice"), 0.3, iterations=2)
    assert widths_of(slim) == expected and len(slim.recipe.edits) == 2


@pytest.mark.slow
def test_without_data_slices_alone_decide(model: EagerModel, tmp_path: Path) -> None:
    context = Context(root=tmp_path / "slim", served_latency=KnownLatency())
    assert share_of(widths_of(prune(model, context, 0.5))) <= 0.5


def test_a_share_out_of_reach_is_said_after_one_model(
    model: EagerModel, blobs: Splits, tmp_path: Path
) -> None:
    served = KnownLatency()
    context = Context(root=tmp_path / "slim", data=blobs, served_latency=served)
    with pytest.raises(StageFailed, match=r"0.01 cannot be reached: .* found is 0.06637; ask"):
        prune(model, context, 0.01)
    assert served.measured == [{"0": 8, "3": 8}]


def test_candidates_are_measured_in_pytorch_where_nothing_can_be_predicted(
    model: EagerModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def latency(pruner: ChannelPruner, module: nn.Module, batch: int) -> float:
        return parameters_of(module) / model.parameters()

    monkeypatch.setattr(ChannelPruner, "_latency", latency)

    class Unknown(KnownLatency):
        @contextmanager
        def tables(self, *_):
            raise StageFailed("it has other operators")
            yield

    context = Context(root=tmp_path / "slim", served_latency=Unknown())
    with caplog.at_level(logging.WARNING):
        slim = prune(model, context, 0.5)
    assert "latency in a runtime is not predicted (it has other operators)" in caplog.text
    assert slim.manifest.facts["latency"]["runtime"] == "PyTorch"
    assert 0.35 < slim.parameters() / model.parameters() <= 0.5


@pytest.mark.slow
def test_cutting_all_groups_alike_is_taken_where_it_loses_less(
    model: EagerModel, blobs: Splits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misleading(space: WidthSpace, *_) -> dict[str, dict[int, float]]:
        dear = {width: float(i) for i, width in enumerate(space.grid["3"])}
        free = dict.fromkeys(space.grid["0"], 0.0)
        return {"0": free, "3": dear}

    monkeypatch.setattr(latency_target, "measure_loss_increases", misleading)
    context = Context(root=tmp_path / "slim", data=blobs, served_latency=KnownLatency())
    assert widths_of(prune(model, context, 0.4)) == {"0": 16, "3": 32}
