"""DeepSpeed's engine against one process without it; skipped where DeepSpeed is not installed."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from compress.common.errors import Unavailable
from compress.core.context import Context
from compress.training.config.parallel import DEEPSPEED, Parallel
from compress.training.config.training import Training, unmet_by_machine
from compress.training.distributed.ddp import DeepSpeedStrategy, deepspeed_configuration
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss
from compress.training.stage import Train
from tests.compress.training.builders import import_net, load_data

HERE = Path(__file__).parents[1]
here = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

# 10 steps in fp32: gradients are added up in another order and clipped with an epsilon elsewhere,
# and Adam's division by a small second moment enlarges the difference.
TOLERANCE = {"sgd": 1e-6, "adamw": 1e-5}
SGD = {"clip_norm": 0.1, "data": "nets:ignored"}
ADAMW = {
    "data": "nets:ignored",
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "accumulate": 2,
    "activation_checkpointing": 2,
    "schedule": "constant",
}
STAGES = {
    "0": {"zero_stage": 0},
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3},
    "2-offload": {"zero_stage": 2, "cpu_offload": True},
    "3-offload": {"zero_stage": 3, "cpu_offload": True},
}


def trainings():
    for name, stage in STAGES.items():
        parallel = {"strategy": "deepspeed", **stage}
        yield f"sgd-{name}", {**SGD, "parallel": parallel}
        yield f"adamw-{name}", {**ADAMW, "accumulate": 4, "parallel": parallel}
        yield f"halves/adamw-{name}", {**ADAMW, "accumulate": 4, "parallel": parallel}
    yield "bf16", {**SGD, "precision": "bf16", "parallel": {"strategy": "deepspeed"}}


@pytest.fixture(scope="module")
def results(tmp_path_factory, trained, launch):
    """Train by engines of two ranks, and alone with the same settings."""
    root = tmp_path_factory.mktemp("engines")
    import_net(root / "source", "nets:blocks")
    alone = {"sgd": SGD, "adamw": ADAMW}
    launch(HERE / "train_on_ranks.py", 2, root, json.dumps(alone), json.dumps(dict(trainings())))
    return {n: trained(root / n) for n in ("sgd", "adamw", *dict(trainings()))}


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@here
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_weights_are_those_of_one_process(results, optimizer, stage):
    alone = results[optimizer]
    engines = results[f"{optimizer}-{stage}"]
    difference = largest_difference(alone.kept_weights, engines.kept_weights)
    assert difference < TOLERANCE[optimizer]
    losses = [epoch.loss for epoch in alone.history]
    assert [epoch.loss for epoch in engines.history] == pytest.approx(losses, abs=1e-4)


@here
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_training_ends_bit_identical(results, stage):
    whole = results[f"adamw-{stage}"]
    halves = results[f"halves/adamw-{stage}"]
    assert largest_difference(whole.kept_weights, halves.kept_weights) == 0
    assert whole.history == halves.history


@here
@pytest.mark.slow
@pytest.mark.multiprocess
def test_bf16_keeps_fp32_weights(results):
    full, half = results["sgd-2"], results["bf16"]
    assert 0 < largest_difference(full.kept_weights, half.kept_weights) < 0.05


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp16", "clip_norm": 1}, "deepspeed has no clip_norm with precision: fp16"),
        ({"on_nan": "skip"}, "deepspeed has no on_nan: skip here"),
        ({"ema_decay": 0.9}, "deepspeed has no ema_decay here"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(settings, words):
    with pytest.raises(ValidationError, match=words):
        Training(epochs=1, parallel={"strategy": "deepspeed"}, **settings)


def test_stages_are_for_the_engine_and_offload_for_those_that_shard():
    with pytest.raises(ValidationError, match="zero_stage is for strategy: deepspeed, found fsdp"):
        Parallel(strategy="fsdp", zero_stage=3)
    with pytest.raises(ValidationError, match="cpu_offload needs zero_stage 1 or more"):
        Parallel(strategy="deepspeed", zero_stage=0, cpu_offload=True)


@pytest.mark.parametrize(
    ("more", "found"),
    [({"strategy": "deepspeed"}, "strategy: deepspeed"), ({"pipeline": {}}, "pipeline")],
)
def test_synchronized_statistics_are_refused_where_they_were_not_run(more, found):
    with pytest.raises(ValidationError, match=f"sync_batchnorm does not go with {found}; leave"):
        Parallel(processes=2, sync_batchnorm=True, **more)


def test_further_settings_of_the_engine_are_passed_on():
    more = {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": True}
    settings = {"strategy": "deepspeed", "cpu_offload": True, "deepspeed_config": more}
    training = Training(epochs=1, batch_size=32, parallel={**settings, "processes": 2})
    found = deepspeed_configuration(training.parallel, training, 2)
    offload = {"device": "cpu"}
    assert found["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": offload,
        "overlap_comm": True,
    }
    assert found["wall_clock_breakdown"] and found["train_micro_batch_size_per_gpu"] == 16
    assert training.parallel.deepspeed_config == more


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": 8}, "train_batch_size is decided by batch_size; leave it out"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is decided by schedule and warmup"),
        ({"fp16": {"enabled": True}}, "fp16 is decided by precision"),
        (
            {"zero_optimization": {"stage": 3}},
            r"\.stage is decided by parallel\.zero_stage",
        ),
        ({"zero_optimization": {"offload_param": {}}}, "offload_param is .* parallel.cpu_offload"),
        ({"zero_optimization": 3}, "zero_optimization is a mapping, found 3"),
    ],
)
def test_settings_of_the_engine_that_others_decide_are_refused(config, words):
    with pytest.raises(ValidationError, match=words):
        Parallel(strategy="deepspeed", cpu_offload=True, deepspeed_config=config)
    with pytest.raises(ValidationError, match="deepspeed_config is for strategy: deepspeed"):
        Parallel(deepspeed_config={"wall_clock_breakdown": True})


def test_without_deepspeed_training_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(type(DEEPSPEED), "missing", lambda self: self.what == "deepspeed")
    stage = Train(epochs=1, parallel={"strategy": "deepspeed"})
    assert DEEPSPEED in stage.all_requirements()
    assert DEEPSPEED not in Train(epochs=1).all_requirements()
    source = import_net(tmp_path / "source", "nets:blocks")
    context = Context(root=tmp_path / "a", data=load_data())
    words = r"^train: needs deepspeed, which is not installed; pip install -e '\.\[deepspeed\]'"
    with pytest.raises(Unavailable, match=words):
        fit(source, stage.hyper_parameters(), TargetLoss(0.1), context, "train")
    assert not (tmp_path / "a.work").exists()


def test_fp16_is_for_a_gpu_where_the_engine_scales_the_loss(tmp_path):
    training = Training(epochs=1, precision="fp16", parallel={"strategy": "deepspeed"})
    (unmet,) = unmet_by_machine(training, "cpu")
    assert unmet.problem.startswith("fp16 needs a CUDA device and this is cpu; ")
    assert [*unmet_by_machine(training, "cuda")] == []
    config = deepspeed_configuration(training.parallel, training, 1)
    assert config["torch_autocast"] == {"enabled": True, "dtype": "float16"}


def test_the_engines_loss_scale_is_saved_and_restored():
    def scaler_of(own):
        strategy = object.__new__(DeepSpeedStrategy)
        optimizer = SimpleNamespace(torch_autocast_gradscaler=own)
        strategy.engine = SimpleNamespace(torch_autocast_z0_gradscaler=None, optimizer=optimizer)
        training = Training(epochs=1, precision="fp16", parallel={"strategy": "deepspeed"})
        return strategy.loss_scaler(training, "cpu")

    own, later = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (256.0, 2.0))
    scaler = scaler_of(own)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss  # `backward` of the engine multiplies it
    own.scale(loss)
    scaler_of(later).load_state_dict(scaler.state_dict())
    assert scaler_of(later).get_scale() == scaler.get_scale() == 256.0
