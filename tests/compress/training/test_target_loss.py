"""The task's loss in a training: whatever shares its steps, parts and processes, it is the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.core.objectives.loss import Loss
from compress.data.splits import Splits
from compress.pruning.prune_channels import PruneChannels
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss
from compress.training.stage import Train
from tests.compress.training.builders import import_net, load_data

HERE = Path(__file__).parent


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source", "nets:plain")


def context(root, loss=None, metric="loss"):
    return Context(root=root, data=load_data("numbers"), loss=Loss(loss), metric=Metric(metric))


def run(source, where, **settings):
    training = Training(**{"epochs": 3, "batch_size": 16, "learning_rate": 0.02, **settings})
    objective = TargetLoss.for_training(training, where, source.signature)
    return fit(source, training, objective, where, "train")


def largest_difference(a, b):
    one, other = a.module.state_dict(), b.module.state_dict()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("metric", ["loss", pytest.param("r2", marks=pytest.mark.soak)])
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_processes_and_parts_take_the_same_steps(tmp_path, source, metric):
    whole = run(source, context(tmp_path / "whole", metric=metric), keep="last")
    parts = run(
        source,
        context(tmp_path / "parts", metric=metric),
        keep="last",
        accumulate=2,
        parallel={"processes": 2},
    )
    assert largest_difference(whole, parts) < 1e-5
    assert [e.loss for e in parts.history] == pytest.approx([e.loss for e in whole.history])
    # R² is a difference of numbers near 1, and so is its rounding: it may lie near 0.
    metrics = [e.metric for e in whole.history]
    assert [e.metric for e in parts.history] == pytest.approx(metrics, abs=1e-6)
    assert whole.history[-1].loss < whole.history[0].loss


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "settings",
    [
        {"processes": 2, "strategy": "fsdp"},
        {"processes": 2, "pipeline": {"stages": 2, "microbatches": 2, "split": ["2"]}},
    ],
    ids=["fsdp", "pipeline"],
)
def test_shards_and_pipelines_follow_the_loss(tmp_path, source, settings):
    whole = run(source, context(tmp_path / "whole", "l1"), keep="last")
    spread = run(source, context(tmp_path / "spread", "l1"), keep="last", parallel=settings)
    assert largest_difference(whole, spread) < 1e-5


@pytest.mark.parametrize("loss", [None, "l1", "smooth_l1"])
def test_half_precision_trains_to_nearly_the_same(tmp_path, source, loss):
    whole = run(source, context(tmp_path / "whole", loss))
    half = run(source, context(tmp_path / "half", loss), precision="bf16")
    assert half.history[-1].loss == pytest.approx(whole.history[-1].loss, rel=0.05)


def test_a_constant_loss_is_known_after_an_interruption_too(tmp_path, source, caplog):
    (tmp_path / "own.py").write_text("def nothing(y, t):\n    return y.sum() * 0 + 2\n")
    where = replace(context(tmp_path / "a"), loss=Loss("own:nothing", folder=tmp_path))

    def stop(task, done, total, note=""):
        if done == 1 and "resumed" not in note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, replace(where, progress=stop), checkpoints={"every_steps": 2})
    found = run(source, where, checkpoints={"every_steps": 2})
    assert [epoch.constant_loss for epoch in found.history] == [True] * 3
    (warning,) = found.facts()["warnings"]
    assert "was 2 in every step of epoch 1, 2, 3" in warning
    assert warning in caplog.text
    assert not run(source, context(tmp_path / "b")).facts().get("warnings")


def test_other_code_of_a_loss_is_another_training(tmp_path, source):
    own = tmp_path / "own.py"
    own.write_text("def half(y, t):\n    return (y - t).square().mean() / 2\n")
    where = replace(context(tmp_path / "a"), loss=Loss("own:half", folder=tmp_path))

    def stop(task, done, total, note=""):
        if done == 2 and "resumed" not in note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, replace(where, progress=stop))
    own.write_text("def half(y, t):\n    return (y - t).abs().mean()\n")
    changed, l1 = run(source, where), run(source, context(tmp_path / "b", "l1"))
    assert [e.loss for e in changed.history] == [e.loss for e in l1.history]


def test_numbers_with_accuracy_are_refused_with_what_to_use(tmp_path, source):
    with pytest.raises(StageFailed, match=r"targets are numbers.* use metric: loss, mse, mae, r2"):
        Train(epochs=1, batch_size=16)(source, context(tmp_path / "a", metric="accuracy"))


def test_a_number_that_is_missing_is_named(tmp_path, source):
    rows = [(torch.ones(4), torch.ones(3) * i if i % 2 else None) for i in range(32)]
    where = replace(context(tmp_path / "a"), data=Splits({"train": rows}))
    with pytest.raises(StageFailed, match="step 1: targets are NaN or infinite, or a sample has"):
        Train(epochs=1, batch_size=16, keep="last")(source, where)


def test_a_straight_loss_has_no_second_derivative(tmp_path, source):
    stage = PruneChannels(ratio=0.5, importance="hessian", calibration_samples=64)
    with pytest.raises(StageFailed, match="needs a loss that is curved, and l1 is not"):
        stage(source, context(tmp_path / "a", "l1"))
