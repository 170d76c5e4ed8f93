"""Each hyper-parameter changes the training as it says, and none of them breaks resuming."""

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.data.splits import Splits
from compress.training.config.training import DEFAULT_LEARNING_RATE, Training
from compress.training.fit import fit
from compress.training.loop.train_state import TrainState
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data

HERE = Path(__file__).parent


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source", "nets:blocks")


def context(root, progress=None):
    more = {"progress": progress} if progress else {}
    return Context(root=root, data=load_data("uneven"), metric=Metric("accuracy"), **more)


def run(source, where, epochs=4, **settings):
    settings = {"batch_size": 16, "learning_rate": 0.01, **settings}
    training = Training(epochs=epochs, **settings)
    objective = TargetLoss(training.label_smoothing, training.class_weights)
    return fit(source, training, objective, where, "train")


def largest_difference(a, b):
    one, other = a.module.state_dict(), b.module.state_dict()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_accumulation_takes_the_same_steps(tmp_path, source):
    whole = run(source, context(tmp_path / "whole"), keep="last", class_weights=(1, 2, 3))
    parts = run(
        source, context(tmp_path / "parts"), keep="last", class_weights=(1, 2, 3), accumulate=4
    )
    # 20 steps in fp32: the order of additions differs, nothing else.
    assert 0 < largest_difference(whole, parts) < 1e-5
    assert [e.loss for e in parts.history] == pytest.approx([e.loss for e in whole.history])


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2, "ema_decay": 0.9, "precision": "bf16"},
        {"schedule": "plateau", "schedule_epochs": 1, "optimizer": "adam"},
        {"schedule": "step", "warmup": 0.2, "optimizer": "rmsprop", "on_nan": "skip"},
    ],
)
def test_an_interrupted_training_ends_bit_identical(tmp_path, source, settings):
    def interrupt(task, done, total, note=""):
        if done == 2 and "resumed" not in note:
            raise KeyboardInterrupt

    whole = run(source, context(tmp_path / "whole"), **settings)
    with pytest.raises(KeyboardInterrupt):
        run(source, context(tmp_path / "parts", interrupt), **settings)
    resumed = run(source, context(tmp_path / "parts"), **settings)
    assert whole.history == resumed.history
    assert largest_difference(whole, resumed) == 0


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("sgd", "adamw")))
        for name in DEFAULT_LEARNING_RATE
    ],
)
def test_every_optimizer_lowers_the_loss(tmp_path, source, optimizer):
    result = run(source, context(tmp_path / "a"), optimizer=optimizer, learning_rate=None, epochs=3)
    assert result.history[-1].loss < result.history[0].loss


def test_an_optimizers_arguments_are_passed_on_and_wrong_ones_refused(tmp_path, source):
    plain = run(source, context(tmp_path / "a"), optimizer="adam")
    other = run(
        source, context(tmp_path / "b"), optimizer="adam", optimizer_arguments={"betas": [0.5, 0.9]}
    )
    assert largest_difference(plain, other) > 0
    with pytest.raises(StageFailed, match=r"optimizer adam refuses .*'beta'.*optimizer_arguments"):
        run(source, context(tmp_path / "c"), optimizer="adam", optimizer_arguments={"beta": 1})


def test_the_moving_average_is_what_is_evaluated_and_kept(tmp_path, source):
    settings = {"keep": "last", "schedule": "constant", "learning_rate": 0.1}
    plain = run(source, context(tmp_path / "a"), **settings)
    where = context(tmp_path / "b")
    smooth = run(source, where, ema_decay=0.99, **settings)
    assert [e.loss for e in smooth.history] == [e.loss for e in plain.history]
    assert largest_difference(plain, smooth) > 1e-3
    assert where.score(source.derive(tmp_path / "sealed", smooth.module)) == smooth.kept.metric


def test_bf16_computes_otherwise_and_keeps_fp32_weights(tmp_path, source):
    full, half = (run(source, context(tmp_path / p), precision=p) for p in ("fp32", "bf16"))
    assert 0 < largest_difference(full, half) < 0.05
    assert all(w.dtype == torch.float32 for w in half.module.state_dict().values())


def test_training_stops_early_and_stays_stopped(tmp_path, source):
    settings = {"early_stopping": 2, "learning_rate": 1e-9, "epochs": 9}
    result = run(source, context(tmp_path / "a"), **settings)
    assert len(result.history) == 3
    assert run(source, context(tmp_path / "a"), **settings).history == result.history


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_rates_and_momenta_of_all_steps_are_torchs_across_an_interruption(
    tmp_path, source, monkeypatch, optimizer
):
    found, take = {}, TrainState.train_step

    def interrupted(state, batches, step, **options):
        if step == 7 and len(found) == 7:
            found[7] = None
            raise KeyboardInterrupt
        group, *_ = state.optimizer.param_groups
        found[step] = group["lr"], group["betas"][0] if "betas" in group else group["momentum"]
        return take(state, batches, step, **options)

    monkeypatch.setattr(TrainState, "train_step", interrupted)
    settings = {"optimizer": optimizer, "checkpoints": {"every_steps": 2}}
    with pytest.raises(KeyboardInterrupt):
        run(source, context(tmp_path / "a"), **settings)
    result = run(source, context(tmp_path / "a"), **settings)
    more = {"momentum": 0.9} if optimizer == "sgd" else {}
    reference = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](
        [torch.zeros(1)], lr=0.01, **more
    )
    scheduler = OneCycleLR(reference, 0.01, total_steps=len(found))
    for step in range(len(found)):
        group = reference.param_groups[0]
        momentum = group["betas"][0] if "betas" in group else group["momentum"]
        assert found[step] == (group["lr"], momentum), step
        reference.step()
        scheduler.step()
    assert result.history[-1].learning_rate == found[len(found) - 1][0]


def test_a_plateau_lowers_the_rate(tmp_path, source):
    settings = {"schedule": "plateau", "schedule_epochs": 1, "learning_rate": 1e-9}
    result = run(source, context(tmp_path / "a"), **settings)
    rates = [epoch.learning_rate for epoch in result.history]
    assert rates == pytest.approx([1e-9, 1e-9, 1e-10, 1e-11])


def poisoned(tmp_path):
    where = context(tmp_path)
    x, y = where.data.split("train").tensors
    x = x.clone()
    x[7] = float("nan")
    bad = torch.utils.data.TensorDataset(x, y)
    return Context(root=tmp_path, data=Splits({**where.data.datasets, "train": bad}))


def test_a_step_whose_loss_is_not_finite_is_left_out_or_stops(tmp_path, source):
    result = run(source, poisoned(tmp_path / "a"), on_nan="skip")
    assert all(torch.isfinite(w).all() for w in result.module.state_dict().values())
    assert result.history[-1].loss < result.history[0].loss
    with pytest.raises(StageFailed, match=r"the loss is nan in epoch 1, step \d.*on_nan: skip"):
        run(source, poisoned(tmp_path / "b"))


def test_a_gradient_that_is_not_finite_is_named_or_its_step_left_out(tmp_path):
    net = import_net(tmp_path / "net", "nets:magnitudes")
    named = (
        r"in epoch 1, step 1, .*the gradient of hidden\.weight, hidden\.bias \(2 in all\).* "
        r"it turns NaN at Pow, nets\.py:\d+ \(return self\.head.*sqrt\(x \+ 1e-8\).*on_nan: skip"
    )
    with pytest.raises(StageFailed, match=named):
        run(net, context(tmp_path / "a"))
    with pytest.raises(StageFailed, match="not finite in any step of epoch 1"):
        run(net, context(tmp_path / "b"), on_nan="skip")


def test_a_skipped_step_leaves_running_statistics_alone(tmp_path):
    net = import_net(tmp_path / "net")
    result = run(net, poisoned(tmp_path / "a"), on_nan="skip")
    assert torch.isfinite(result.module.norm.running_mean).all()


def test_class_weights_must_be_one_for_each_class(tmp_path, source):
    with pytest.raises(StageFailed, match="class_weights has 2 numbers and the model 3 classes"):
        run(source, context(tmp_path / "a"), class_weights=(1, 2))


def test_impossible_settings_are_refused_in_one_line(tmp_path, source):
    with pytest.raises(
        Unavailable, match="precision: fp16 needs a CUDA device and this is cpu; use bf16"
    ):
        run(source, context(tmp_path / "a"), precision="fp16")
    where = context(tmp_path / "b")
    del where.data.datasets["val"]
    with pytest.raises(PipelineInvalid, match="schedule: plateau needs a split 'val'"):
        run(source, where, keep="last", schedule="plateau")
    with pytest.raises(PipelineInvalid, match="early_stopping: needs a split 'val'"):
        run(source, where, keep="last", early_stopping=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_trains_on_cuda(tmp_path, source, precision):
    where = context(tmp_path / "a")
    where = Context(root=where.root, data=where.data, device="cuda:0")
    result = run(source, where, precision=precision, epochs=6, clip_norm=1.0)
    assert result.history[-1].loss < result.history[0].loss


def test_a_model_of_one_batch_size_is_trained_and_evaluated_in_it(tmp_path):
    """Of any other size nothing is trained, and the error says which one to set."""
    fixed = import_net(tmp_path / "source", "nets:four_rows", rows=4)
    result = run(fixed, context(tmp_path / "a"), epochs=1, batch_size=4)
    assert result.history[0].metric is not None
    result = run(fixed, context(tmp_path / "b"), epochs=1, batch_size=8, accumulate=2)
    assert result.history[0].metric is not None
    with pytest.raises(StageFailed, match=r"no batch of 8: .*batches of 4: set batch_size: 8"):
        run(fixed, context(tmp_path / "c"), epochs=1, batch_size=16, accumulate=2)
