"""Every strategy, on real gloo processes, reaches the weights of a single process."""

import json
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compress.training.config.parallel import Parallel, Prefetch
from compress.training.distributed.fsdp import prefetch_, round_buffers_
from tests.compress.training.builders import import_net
from tests.compress.training.nets import ignored

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).parent

# 6 steps in fp32: gradients are added up in another order, and Adam's division by a small second
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
    "prefetch": {**FULL, "prefetch": {"forward": 2, "backward": 1}},
}
ACCUMULATED = ("ddp", "ddp-static", "zero1", "zero2", "full")
ON_FOUR = {"sgd": ("ddp", "zero1", "full", "hybrid"), "adamw": ("zero1", "full")}
"""By the optimizer; the head's three rows leave one of four ranks without a shard of it."""
OTHER = {"ddp": FULL, "full": {"strategy": "zero1"}, "zero1": {}, "zero2": {}}
"""What one strategy saved another takes up."""
ALSO_ALONE = ("ddp", "zero1", "full")
COMPRESSED = {
    "int8": {"communication": "int8", "int8_rounding": "stochastic"},
    "topk": {"communication": "topk", "topk_fraction": 0.2},
    "powersgd": {"communication": "powersgd", "powersgd_rank": 1},
}
"""What they leave out of a gradient is remembered, and goes on too."""
RESUMED = {**{name: STRATEGIES[name] for name in OTHER}, **COMPRESSED}
IN_SOAK = {
    2: {
        *(
            f"{how}adamw-{name}"
            for how in ("", "halves/", "other/")
            for name in ("ddp-static", "zero2", "int8", "powersgd")
        ),
        # Others reach the weights with shards, static graphs and a wrapped model, too.
        *("sgd-ddp-static", "sgd-zero3"),
        # Four have hybrid shards of two groups; Muon with the shards of FSDP has more to gather.
        *("sgd-hybrid", "muon-zero1", "halves/muon-zero1"),
        *("halves/adamw-ddp", "other/adamw-zero1", "alone/adamw-ddp", "alone/adamw-zero1"),
    },
    4: {"sgd-ddp", "sgd-zero1", "sgd-full", "adamw-zero1", "odd-together"},
}
"""Ranks → trainings that `make soak` has; CI has others of each kind."""
# One epoch of 3 steps; the trainings by AdamW have the second, and its order of the samples.
# Labels that are ignored: the ranks and micro-batches of a step have different numbers of others.
SGD = {"clip_norm": 0.1, "epochs": 1, "data": "nets:ignored"}
ADAMW = {
    "data": "nets:ignored",
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "accumulate": 2,
    "activation_checkpointing": 2,
    "schedule": "constant",
    "ema_decay": 0.9,
}
F1 = "torchmetrics.classification.MulticlassF1Score 3"
ODD = {**SGD, "data": "nets:odd", "metric": F1}
MUON = {**SGD, "epochs": 2, "optimizer": "muon", "learning_rate": 1e-3}
WITH_MUON = {name: STRATEGIES[name] for name in ("zero1", "full")}
ALONE = {"sgd": SGD, "adamw": ADAMW, "metric": {**SGD, "metric": "loss"}, "odd": ODD, "muon": MUON}
TWO_BY_TWO = {"communication": "hierarchical", "group_processes": 2}


def trainings(ranks):
    adamw = {**ADAMW, "accumulate": 4 if ranks == 2 else 2}
    for name in STRATEGIES if ranks == 2 else ON_FOUR["sgd"]:
        yield f"sgd-{name}", {**SGD, "parallel": STRATEGIES[name]}
    for name in ACCUMULATED if ranks == 2 else ON_FOUR["adamw"]:
        yield f"adamw-{name}", {**adamw, "parallel": STRATEGIES[name]}
    yield "odd-together", ODD
    if ranks == 4:
        yield "sgd-hierarchical", {**SGD, "parallel": TWO_BY_TWO}
    if ranks == 2:
        few = {"data": "nets:few", "batch_size": 64, "accumulate": 2}
        yield "few", {**SGD, **few, "epochs": 2}
        yield from trainings_that_go_on(adamw)
        yield "metric-loss", {**SGD, "metric": "loss", "parallel": FULL}
        yield "bf16", {**SGD, "precision": "bf16", "parallel": FULL}
        for name, parallel in WITH_MUON.items():
            yield f"muon-{name}", {**MUON, "parallel": parallel}
            yield f"halves/muon-{name}", {**MUON, "parallel": parallel}


def trainings_that_go_on(adamw):
    for name, parallel in COMPRESSED.items():
        yield f"adamw-{name}", {**adamw, "parallel": parallel}
    for name, parallel in RESUMED.items():
        yield f"halves/adamw-{name}", {**adamw, "parallel": parallel}
    for name, parallel in OTHER.items():
        yield f"other/adamw-{name}", {**adamw, "parallel": parallel}
    for name in ALSO_ALONE:
        yield f"alone/adamw-{name}", adamw


@pytest.fixture(scope="module")
def results_of(tmp_path_factory, trained, launch):
    """Return a function of the ranks: trains with every strategy once, and alone likewise."""

    class Results:
        def __init__(self, ranks):
            self.ranks, self.root = ranks, tmp_path_factory.mktemp(f"{ranks}-ranks")
            import_net(self.root / "source", "nets:blocks")
            self.launch(ALONE, in_soak=False)

        def launch(self, alone, in_soak):
            asked = IN_SOAK[self.ranks]
            together = {n: s for n, s in trainings(self.ranks) if (n in asked) == in_soak}
            script = HERE / "train_on_ranks.py"
            launch(script, self.ranks, self.root, json.dumps(alone), json.dumps(together))

        def __getitem__(self, name):
            if not (self.root / name).exists():
                self.launch({}, in_soak=True)
            return trained(self.root / name)

    return cache(Results)


@pytest.fixture
def two(results_of):
    return results_of(2)


def largest_difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def by(optimizer, names, ranks=2, how=""):
    """Return the parameters of a test, those of `make soak` marked."""
    return [
        pytest.param(
            *([ranks] * (not how)),
            name,
            marks=[pytest.mark.soak] * (f"{how}{optimizer}-{name}" in IN_SOAK[ranks]),
        )
        for name in names
    ]


def on_two_and_on_four(names, optimizer):
    return [*by(optimizer, names), *by(optimizer, ON_FOUR[optimizer], 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), on_two_and_on_four(STRATEGIES, "sgd"))
def test_the_weights_are_those_of_one_process(results_of, ranks, strategy):
    results = results_of(ranks)
    alone, together = results["sgd"], results[f"sgd-{strategy}"]
    assert largest_difference(alone.weights, together.weights) < TOLERANCE["sgd"]
    # 37 samples do not divide over the ranks: each that has a label is counted once.
    assert [e.metric for e in together.history] == [e.metric for e in alone.history]
    labelled = sum(int(label) >= 0 for _, label in ignored()["val"])
    assert 0 < labelled < 37
    assert all((e.metric * labelled) % 1 == pytest.approx(0, abs=1e-9) for e in together.history)
    losses = [e.loss for e in alone.history]
    assert [e.loss for e in together.history] == pytest.approx(losses, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), on_two_and_on_four(ACCUMULATED, "adamw"))
def test_accumulation_average_and_checkpointed_activations_go_with_it(results_of, ranks, strategy):
    results = results_of(ranks)
    alone, together = results["adamw"], results[f"adamw-{strategy}"]
    assert largest_difference(alone.weights, together.weights) < TOLERANCE["adamw"]
    assert largest_difference(alone.kept_weights, together.kept_weights) < TOLERANCE["adamw"]
    assert largest_difference(alone.weights, alone.kept_weights) > 5 * TOLERANCE["adamw"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", by("adamw", RESUMED, how="halves/"))
def test_a_resumed_training_ends_bit_identical(two, strategy):
    whole, halves = two[f"adamw-{strategy}"], two[f"halves/adamw-{strategy}"]
    assert largest_difference(whole.weights, halves.weights) == 0
    assert largest_difference(whole.kept_weights, halves.kept_weights) == 0
    assert whole.history == halves.history


@pytest.mark.slow
@pytest.mark.parametrize("strategy", by("muon", WITH_MUON, how="halves/"))
def test_muon_steps_shards_as_whole_matrices_and_resumes_bit_identical(two, strategy):
    alone, whole, halves = two["muon"], two[f"muon-{strategy}"], two[f"halves/muon-{strategy}"]
    # Muon multiplies in bf16, where products of shards add up in another order.
    tolerance = {"zero1": 1e-6, "full": 1e-3}[strategy]
    assert largest_difference(alone.weights, whole.weights) < tolerance
    assert largest_difference(whole.weights, halves.weights) == 0


@pytest.mark.slow
@pytest.mark.parametrize("communication", by("adamw", COMPRESSED, how="halves/"))
def test_fewer_bytes_are_sent(two, communication):
    sent = [two[f"adamw-{name}"].history[0].sent_bytes for name in (communication, "ddp")]
    assert 0 < sent[0] < sent[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "times"), [("zero1", 1.5), ("zero2", 1.5), ("full", 2), ("none", 1)]
)
def test_bytes_of_weights_are_counted_and_those_of_evaluation_are_not(two, strategy, times):
    """A process sends half of the weights to gather them, and as many bytes as DDP for the sum."""
    (gradients,), (sent,) = (
        {epoch.sent_bytes for epoch in two[f"sgd-{name}"].history} for name in ("ddp", strategy)
    )
    assert sent / gradients == pytest.approx(times, abs=0.1)  # shards of few rows are padded


@pytest.mark.slow
@pytest.mark.parametrize("strategy", by("adamw", OTHER, how="other/"))
def test_a_checkpoint_of_one_strategy_is_resumed_by_another(two, strategy):
    whole, other = two[f"adamw-{strategy}"], two[f"other/adamw-{strategy}"]
    assert largest_difference(whole.weights, other.weights) < TOLERANCE["adamw"]
    assert largest_difference(whole.kept_weights, other.kept_weights) < TOLERANCE["adamw"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", by("adamw", ALSO_ALONE, how="alone/"))
def test_a_checkpoint_of_several_processes_is_resumed_by_one(two, strategy):
    whole, other = two[f"adamw-{strategy}"], two[f"alone/adamw-{strategy}"]
    assert largest_difference(whole.weights, other.weights) < TOLERANCE["adamw"]
    assert largest_difference(whole.kept_weights, other.kept_weights) < TOLERANCE["adamw"]


def test_the_next_blocks_are_gathered_ahead_and_backward_the_last():
    blocks = [Mock() for _ in range(4)]
    prefetch_(blocks, Prefetch(forward=2, backward=2))
    ahead = [b.set_modules_to_forward_prefetch.call_args.args[0] for b in blocks]
    assert ahead == [blocks[1:3], blocks[2:4], blocks[3:], []]
    behind = [b.set_modules_to_backward_prefetch.call_args.args[0] for b in blocks]
    assert behind == [[], blocks[:1], [blocks[1], blocks[0]], [blocks[2], blocks[1]]]


@pytest.mark.slow
def test_gathering_ahead_changes_no_bit(two):
    ahead, usual = two["sgd-prefetch"], two["sgd-full"]
    assert largest_difference(ahead.weights, usual.weights) == 0


@pytest.mark.slow
def test_a_mean_loss_is_reduced_over_samples(two):
    alone, together = two["metric"], two["metric-loss"]
    expected = [e.metric for e in alone.history]
    assert [e.metric for e in together.history] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_bf16_shards_keep_fp32_weights(two):
    full, half = two["sgd-full"], two["bf16"]
    assert 0 < largest_difference(full.weights, half.weights) < 0.05
    assert all(w.dtype == torch.float32 for w in half.weights.values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_sizes_that_do_not_divide_work(results_of, ranks):
    """21 samples make one step of 16; a single one in `val` leaves the other ranks without."""
    alone, together = results_of(ranks)["odd"], results_of(ranks)["odd-together"]
    assert largest_difference(alone.weights, together.weights) < TOLERANCE["sgd"]
    assert [e.metric for e in together.history] == [e.metric for e in alone.history]
    assert all(e.metric is not None for e in together.history)


@pytest.mark.slow
def test_fewer_samples_than_a_batch_are_one_step(two):
    assert len(two["few"].history) == 2
    assert all(epoch.loss > 0 and epoch.metric is not None for epoch in two["few"].history)


@pytest.mark.slow
def test_an_epoch_says_what_it_sent_between_groups(results_of):
    alone, together = results_of(4)["sgd"], results_of(4)["sgd-hierarchical"]
    assert largest_difference(alone.weights, together.weights) < TOLERANCE["sgd"]
    whole = sum(weight.nbytes for weight in alone.weights.values())
    ((total, between),) = {(e.sent_bytes, e.sent_between_bytes) for e in together.history}
    assert between == pytest.approx(whole / 2, abs=4)
    assert total == 4 * between
    assert {e.sent_between_bytes for e in alone.history} == {None}


def test_buffers_are_rounded_for_a_call_and_what_it_writes_is_kept():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.tensor([1.001, 2.0]))
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("ids", torch.arange(2))

        def forward(self, x):
            self.calls += 1
            self.seen = self.table.dtype, self.ids.dtype
            return x + self.table

    module = Shifted()
    stored = module.table
    round_buffers_(module, torch.bfloat16)
    assert module(torch.zeros(2)).tolist() == [1.0, 2.0]
    assert module.seen == (torch.bfloat16, torch.int64)
    assert module.table is stored and stored[0] == torch.tensor(1.001)
    assert (module.calls.tolist(), module.calls.dtype) == ([1.0], torch.float32)
    with pytest.raises(ValidationError, match="buffer_dtype is for strategy: fsdp"):
        Parallel(buffer_dtype="bf16")
    assert "buffers in bf16" in Parallel(strategy="fsdp", buffer_dtype="bf16").layout
