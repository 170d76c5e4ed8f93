"""Every strategy, on real gloo processes, reaches the weights of a single process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress.core.checkpoint import import_checkpoint
from compress.core.recipe import Recipe
from compress.core.signature import Signature, TensorSpec
from compress.training.resume import read_state

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

# 20 steps in fp32: gradients are added up in another order, and Adam's division by a small second
# moment enlarges the difference.
TOLERANCE = {"sgd": 1e-5, "adamw": 1e-4}

FULL = {"strategy": "fsdp", "wrap": ["Block"]}
STRATEGIES = {
    "ddp": {},
    "ddp-static": {"static_graph": True, "bucket_mebibytes": 0.001},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2", "wrap": 100},
    "zero3": {"strategy": "zero3", "wrap": 100},
    "full": FULL,
    "none": {**FULL, "sharding": "no_shard"},
    "hybrid": {**FULL, "sharding": "hybrid_shard"},
    "offload": {**FULL, "cpu_offload": True},
}
SGD = {"clip_norm": 0.1}
ADAMW = {
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "accumulate": 2,
    "activation_checkpointing": 2,
    "schedule": "constant",
    "ema_decay": 0.9,
}
ALONE = {"sgd": SGD, "adamw": ADAMW, "metric": {**SGD, "metric": "loss"}}


def trainings(ranks):
    for name, parallel in STRATEGIES.items():
        yield f"sgd-{name}", {**SGD, "parallel": parallel}
        if name in ("ddp", "zero1", "zero2", "full"):
            adamw = {**ADAMW, "accumulate": 4 if ranks == 2 else 2}
            yield f"adamw-{name}", {**adamw, "parallel": parallel}
            yield f"adamw-{name}-halves", {**adamw, "parallel": parallel, "halves": True}
    static = {**ADAMW, "accumulate": 4 if ranks == 2 else 2, "parallel": STRATEGIES["ddp-static"]}
    yield "adamw-ddp-static", static
    yield "metric-loss", {**SGD, "metric": "loss", "parallel": FULL}
    yield "bf16", {**SGD, "precision": "bf16", "parallel": FULL}


def launch(root, ranks, alone, together):
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
         HERE / "ranks_here.py", root, json.dumps(alone), json.dumps(together)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(
    scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"]
)
def results(request, tmp_path_factory):
    """Train with every strategy once, and alone with the same settings."""
    root = tmp_path_factory.mktemp(f"{request.param}-ranks")
    signature = Signature(inputs=(TensorSpec(name="features", shape=("batch", 4)),))
    recipe = Recipe(factory="nets:blocks")
    import_checkpoint(root / "source", recipe, signature, checkpoint=None, folder=HERE)
    launch(root, request.param, ALONE, dict(trainings(request.param)))
    return root


def state(root, name):
    found = read_state(root / name)
    assert found is not None
    return found


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_weights_are_those_of_one_process(results, strategy):
    alone, together = state(results, "sgd"), state(results, f"sgd-{strategy}")
    assert largest_difference(alone.weights, together.weights) < TOLERANCE["sgd"]
    # 37 samples do not divide over the ranks: each is counted once.
    assert [e.metric for e in together.history] == [e.metric for e in alone.history]
    assert all((e.metric * 37) % 1 == pytest.approx(0, abs=1e-9) for e in together.history)
    losses = [e.loss for e in alone.history]
    assert [e.loss for e in together.history] == pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "ddp-static", "zero1", "zero2", "full"])
def test_accumulation_average_and_checkpointed_activations_go_with_it(results, strategy):
    alone, together = state(results, "adamw"), state(results, f"adamw-{strategy}")
    assert largest_difference(alone.weights, together.weights) < TOLERANCE["adamw"]
    assert largest_difference(alone.kept_weights, together.kept_weights) < TOLERANCE["adamw"]
    assert largest_difference(alone.weights, alone.kept_weights) > 10 * TOLERANCE["adamw"]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "full"])
def test_a_resumed_training_ends_bit_identical(results, strategy):
    whole, halves = state(results, f"adamw-{strategy}"), state(results, f"adamw-{strategy}-halves")
    assert largest_difference(whole.weights, halves.weights) == 0
    assert largest_difference(whole.kept_weights, halves.kept_weights) == 0
    assert whole.history == halves.history


def test_a_mean_loss_is_reduced_over_samples(results):
    alone, together = state(results, "metric"), state(results, "metric-loss")
    expected = [e.metric for e in alone.history]
    assert [e.metric for e in together.history] == pytest.approx(expected, abs=1e-6)


def test_bf16_shards_keep_fp32_weights(results):
    full, half = state(results, "sgd-full"), state(results, "bf16")
    assert 0 < largest_difference(full.weights, half.weights) < 0.05
    assert all(w.dtype == torch.float32 for w in half.weights.values())
