"""Learning rate and momentum of every step are those of torch's own schedulers."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import lr_scheduler as torch_schedulers

from compress.common.errors import StageFailed
from compress.core.metrics import Metric
from compress.training.checkpoint import Epoch
from compress.training.config.training import DEFAULT_LEARNING_RATE, Training
from compress.training.distributed.ddp import EngineOptimizer
from compress.training.optim.optimizer import Schedule, build_optimizer

PEAK = 0.5
EPOCHS, EACH = 4, 10
STEPS = EPOCHS * EACH
ACCURACY = Metric("accuracy")
FOLDER = Path(__file__).parents[1]
METRICS = (0.5, 0.6, 0.6, 0.6)


def create(metric=ACCURACY, steps_per_epoch=EACH, **settings):
    training = Training(**{"epochs": EPOCHS, "learning_rate": PEAK, **settings})
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))  # two parameter groups
    return Schedule(build_optimizer(net, training), training, steps_per_epoch, metric, FOLDER)


def epoch_of(number, metric=0.5):
    return Epoch(epoch=number, loss=1.0, metric=metric, learning_rate=PEAK)


def values(optimizer):
    """Return rate and momentum of a step, which all groups share."""
    groups = [
        (group["lr"], group["betas"][0] if "betas" in group else group.get("momentum"))
        for group in optimizer.param_groups
    ]
    assert len(set(groups)) == 1
    return groups[0]


def ours(schedule, metrics=METRICS):
    """Return the values of all steps, in the order of calls of the training loop."""
    steps = []
    for number, metric in enumerate(metrics, 1):
        for _ in range(schedule.steps_per_epoch):
            schedule.apply_()
            assert schedule.learning_rate == schedule.optimizer.param_groups[0]["lr"]
            steps.append(values(schedule.optimizer))
            schedule.step()
        schedule.finish_epoch(epoch_of(number, metric))
    return steps


def torchs(build, optimizer, steps=STEPS):
    scheduler, found = build(optimizer), []
    for _ in range(steps):
        found.append(values(optimizer))
        optimizer.step()
        scheduler.step()
    return found


def sgd():
    return torch.optim.SGD([torch.zeros(1)], PEAK, momentum=0.9, nesterov=True)


def after_warm_up(build, steps=8):
    def chain(optimizer):
        ramp = torch_schedulers.LinearLR(optimizer, 1 / steps, total_iters=steps - 1)
        return torch_schedulers.SequentialLR(optimizer, [ramp, build(optimizer)], [steps])

    return chain


def one_cycle(optimizer, steps=STEPS, **more):
    return torch_schedulers.OneCycleLR(optimizer, PEAK, total_steps=steps, **more)


BY_STEP = {
    "onecycle": ({}, one_cycle),
    "onecycle-warmup": ({"warmup": 0.5}, lambda o: one_cycle(o, pct_start=0.5)),
    "onecycle-none": ({"warmup": 0}, lambda o: one_cycle(o, pct_start=0.0)),
    "constant": ({}, lambda o: torch_schedulers.ConstantLR(o, factor=1.0)),
    "cosine": ({}, lambda o: torch_schedulers.CosineAnnealingLR(o, STEPS)),
    "cosine-min": (
        {"min_learning_rate": 0.1},
        lambda o: torch_schedulers.CosineAnnealingLR(o, STEPS, eta_min=0.1),
    ),
    "cosine-warmup": (
        {"warmup": 0.2},
        after_warm_up(lambda o: torch_schedulers.CosineAnnealingLR(o, STEPS - 8)),
    ),
    "cosine_restarts": (
        {"schedule_epochs": 2, "min_learning_rate": 0.1},
        lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, 2 * EACH, eta_min=0.1),
    ),
    "cosine_restarts-warmup": (
        {"warmup": 0.2},
        after_warm_up(lambda o: torch_schedulers.CosineAnnealingWarmRestarts(o, EACH)),
    ),
    "linear": (
        {"min_learning_rate": 0.1},
        lambda o: torch_schedulers.LinearLR(o, 1.0, end_factor=0.2, total_iters=STEPS),
    ),
    "linear-warmup": (
        {"warmup": 0.2},
        after_warm_up(lambda o: torch_schedulers.LinearLR(o, 1.0, 0.0, total_iters=STEPS - 8)),
    ),
    "polynomial": (
        {"schedule_power": 0.9},
        lambda o: torch_schedulers.PolynomialLR(o, STEPS, power=0.9),
    ),
    "step": (
        {"schedule_epochs": 2, "schedule_factor": 0.5},
        lambda o: torch_schedulers.StepLR(o, 2 * EACH, gamma=0.5),
    ),
}


@pytest.mark.parametrize("name", BY_STEP)
def test_every_step_is_torchs_the_last_one_too(name):
    settings, build = BY_STEP[name]
    found = ours(create(schedule=name.partition("-")[0], **settings))
    expected = torchs(build, sgd())
    assert [momentum for _, momentum in found] == [momentum for _, momentum in expected]
    rates = [rate for rate, _ in expected]
    assert [rate for rate, _ in found] == pytest.approx(rates, rel=1e-12, abs=1e-15)
    assert max(rates) == pytest.approx(PEAK, rel=0.01)


def test_one_cycle_lowers_the_momentum_while_the_rate_rises():
    found = ours(create())
    assert found[0] == pytest.approx((PEAK / 25, 0.95))
    assert found[-1] == pytest.approx((PEAK / 25e4, 0.95))
    peak = max(found)
    assert peak[0] == pytest.approx(PEAK, rel=0.01) and peak[1] == pytest.approx(0.85, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in DEFAULT_LEARNING_RATE if name != "muon"])
def test_one_cycle_is_torchs_for_every_optimizer(name):
    schedule = create(optimizer=name)
    groups = [
        {"params": [torch.zeros(1)], "weight_decay": group["weight_decay"]}
        for group in schedule.optimizer.param_groups
    ]
    more = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    optimizer = type(schedule.optimizer)(groups, lr=PEAK, **more)
    # torch would give RMSprop, whose momentum is 0 by default, one of 0.95.
    cycles = name == "sgd" or "betas" in optimizer.defaults
    expected = torchs(lambda o: one_cycle(o, cycle_momentum=cycles), optimizer)
    assert ours(schedule) == expected
    assert (len({momentum for _, momentum in expected}) > 1) == cycles


@pytest.mark.parametrize(
    ("settings", "momentum"),
    [
        ({"momentum": 0.8}, 0.8),
        ({"momentum": 0, "nesterov": False}, 0),
        ({"optimizer": "adamw", "optimizer_arguments": {"betas": [0.9, 0.95]}}, 0.9),
        ({"optimizer": "rmsprop", "optimizer_arguments": {"momentum": 0.5}}, 0.5),
        ({"schedule": "cosine"}, 0.9),
    ],
)
def test_a_momentum_that_is_given_stays(settings, momentum):
    assert {found for _, found in ours(create(**settings))} == {momentum}


@pytest.mark.parametrize("warmup", [0.1, 0.2])
def test_a_rise_of_one_step_or_two_starts_at_a_finite_rate(warmup):
    found = ours(create(warmup=warmup, epochs=1), metrics=(0.5,))
    assert all(math.isfinite(rate) for rate, _ in found)
    assert found[round(10 * warmup) - 1][0] == pytest.approx(PEAK)


@pytest.mark.parametrize("schedule", ["constant", "step", "cosine", "plateau"])
def test_the_warm_up_rises_from_its_first_step_on(schedule):
    rates = [rate for rate, _ in ours(create(schedule=schedule, warmup=0.2, schedule_epochs=3))]
    assert rates[:9] == pytest.approx([PEAK * step / 8 for step in (*range(1, 9), 8)])


def test_steps_fall_at_the_end_of_an_epoch_after_a_warm_up_too():
    found = ours(create(schedule="step", schedule_epochs=2, warmup=0.2))
    assert [rate for rate, _ in found[18:22]] == pytest.approx([PEAK, PEAK, PEAK / 10, PEAK / 10])


@pytest.mark.parametrize(
    ("name", "metrics", "falls"),
    [
        ("accuracy", (0.5, 0.4, 0.4, 0.4, 0.4, 0.4), (0, 0, 0, 1, 1, 2)),
        ("accuracy", (0.5, 0.4, 0.6, 0.5, 0.5, 0.7), (0, 0, 0, 0, 0, 1)),
        ("loss", (0.5, 0.4, 0.4, 0.4, 0.3, 0.2), (0, 0, 0, 0, 1, 1)),
    ],
)
def test_a_plateau_is_torchs(name, metrics, falls):
    schedule = create(Metric(name), schedule="plateau", schedule_epochs=2, epochs=6)
    optimizer = sgd()
    reference = torch_schedulers.ReduceLROnPlateau(
        optimizer, "min" if name == "loss" else "max", patience=1, threshold=0.0
    )
    expected = []
    for metric in metrics:
        expected += [values(optimizer)] * EACH
        reference.step(metric)
    found = ours(schedule, metrics)
    assert found == expected
    rates = [rate for rate, _ in found[::EACH]]
    assert rates == pytest.approx([PEAK * 0.1**fall for fall in falls])


def test_a_plateau_stops_at_the_lowest_rate():
    settings = {"schedule": "plateau", "schedule_epochs": 1, "min_learning_rate": 0.02}
    assert ours(create(**settings), (0.5, 0.5, 0.5, 0.5))[-1][0] == 0.02


def test_the_groups_of_a_deepspeed_engine_get_the_values():
    inner = torch.optim.AdamW([torch.zeros(1)], PEAK, betas=(0.9, 0.95))
    training = Training(epochs=EPOCHS, learning_rate=PEAK, optimizer="adamw")
    engine = SimpleNamespace(optimizer=inner)
    schedule = Schedule(EngineOptimizer(engine), training, EACH, ACCURACY)
    schedule.apply_()
    assert inner.param_groups[0]["lr"] == pytest.approx(PEAK / 25)
    assert inner.param_groups[0]["betas"] == pytest.approx((0.95, 0.95))


def test_a_scheduler_of_the_user_gets_all_steps_and_decides_each():
    rates = [rate for rate, _ in ours(create(schedule="nets:halving", optimizer="adamw"))]
    assert rates == [PEAK * 0.5 ** (step // 8) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("by_metric", "returned ReduceLROnPlateau, expected .* use schedule: plateau"),
        ("no_scheduler", r"returned float, expected a scheduler of torch\.optim"),
        ("failing", "raised: TypeError: .* it is called with the optimizer and the number"),
    ],
)
def test_what_is_no_scheduler_is_refused(name, message):
    with pytest.raises(StageFailed, match=f"^schedule: nets:{name} {message}"):
        create(schedule=f"nets:{name}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 0.1}, "warmup is decided by schedule: nets:halving; leave it out"),
        ({"min_learning_rate": 0.1}, "min_learning_rate is for schedule: cosine, .*nets:halving"),
    ],
)
def test_settings_that_the_users_scheduler_decides_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        create(schedule="nets:halving", **settings)


def test_a_resumed_training_goes_on_with_the_same_bits_from_any_step():
    for name in {name.partition("-")[0]: None for name in (*BY_STEP, "plateau", "nets:halving")}:
        settings = {"schedule": name, "schedule_epochs": 1}
        settings |= {} if ":" in name else {"warmup": 0.2}
        start = epoch_of(0, 0.6)
        history = [start, *(epoch_of(n, metric) for n, metric in enumerate(METRICS, 1))]
        whole = create(**settings)
        whole.fast_forward([start], 0)
        expected = ours(whole)
        for step in range(STEPS):
            resumed = create(**settings)
            # As a checkpoint of another step leaves it.
            for group in resumed.optimizer.param_groups:
                group.update(lr=7.0, momentum=0.1, initial_lr=3.0)
            resumed.fast_forward(history[: 1 + step // EACH], step % EACH)
            resumed.apply_()
            assert values(resumed.optimizer) == expected[step], (name, step)
