"""Traces, speed and memory of a training, none of which changes its result."""

import json
import logging
import mmap
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.common.errors import Unavailable
from compress.core.context import Context
from compress.data.batch import Batch
from compress.profiling.operator_table import LISTED_OPERATORS, read_operator_tables
from compress.pruning.prune_channels import PruneChannels
from compress.training.checkpoint import Epoch
from compress.training.config.training import Trace
from compress.training.distributed.base import Strategy
from compress.training.loop.metrics import (
    EpochMetrics,
    StepMetrics,
    recording_memory,
    tokens_in,
)
from compress.training.stage import Train
from tests.compress.training.builders import import_net, load_data

MEASURING = {"profile": {"trace": 2, "tracker": "tensorboard", "tracking_uri": "elsewhere"}}


@pytest.fixture
def source(tmp_path):
    return import_net(tmp_path / "source")


def context(root, notes=None):
    def progress(task, done, total, note=""):
        if notes is not None:
            notes.append(note)

    return Context(root=root, data=load_data(batch_size=128), progress=progress)


def steps_in(trace: Path) -> int:
    events = json.loads(trace.read_text())["traceEvents"]
    return len({e["name"] for e in events if e["name"].startswith("ProfilerStep#")})


def test_profiling_settings_are_part_of_no_cache_key():
    settings = {"epochs": 3, "batch_size": 32}
    assert Train(**settings, **MEASURING).own_settings() == Train(**settings).own_settings()
    assert (
        PruneChannels(ratio=0.5, finetune={**settings, **MEASURING}).own_settings()
        == PruneChannels(ratio=0.5, finetune=settings).own_settings()
    )
    kept = Train(**settings, **MEASURING).hyper_parameters()
    assert (kept.profile.trace_settings, kept.profile.tracker) == (Trace(active=2), "tensorboard")
    assert Train(**settings, profile={"trace": True}).profile.trace_settings == Trace()
    assert Train(**settings).profile.trace_settings is None
    with pytest.raises(ValidationError, match="tracking_uri is for tracker: tensorboard or mlflow"):
        Train(**settings, profile={"tracking_uri": "somewhere"})


def test_a_trace_holds_the_steps_asked_for_and_the_result_stays_the_same(tmp_path, source, capfd):
    notes = []
    plain = Train(epochs=2, batch_size=16)(source, context(tmp_path / "a" / "train", notes))
    traced = Train(epochs=2, batch_size=16, profile={"trace": 2})(
        source, context(tmp_path / "b" / "train")
    )
    assert traced.digest == plain.digest
    files = [f for f in (tmp_path / "b" / "profiles").rglob("*") if f.is_file()]
    folder = tmp_path / "b" / "profiles" / "train"
    assert sorted(files) == [folder / "operators.json", folder / "trace-rank0.json"]
    assert steps_in(folder / "trace-rank0.json") == 2
    assert not (tmp_path / "a" / "profiles").exists()
    assert "samples/s" in notes[-1] and "samples/s" not in json.dumps(plain.manifest.facts)
    assert capfd.readouterr() == ("", "")


def test_a_trace_has_memory_shapes_and_stack_of_the_scheduled_steps(tmp_path, source):
    settings = {"wait": 0, "warmup": 2, "active": 3, "memory": True, "shapes": True, "stack": True}
    plain = Train(epochs=1, batch_size=16)(source, context(tmp_path / "a" / "train"))
    traced = Train(epochs=1, batch_size=16, profile={"trace": settings})(
        source, context(tmp_path / "b" / "train")
    )
    assert traced.digest == plain.digest
    profiles = tmp_path / "b" / "profiles"
    trace = profiles / "train" / "trace-rank0.json"
    events = json.loads(trace.read_text())["traceEvents"]
    steps = {e["name"] for e in events if e["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"}
    products = [e["args"] for e in events if e["name"] == "aten::addmm"]
    # Two layers in three steps; 16 samples of 4 numbers times the weights of 16 units.
    assert len(products) == 6
    assert products[0]["Input Dims"][:3] == [[16], [16, 4], [4, 16]]
    assert any(e["name"] == "[memory]" for e in events)
    assert any("nets.py" in e["name"] and "forward" in e["name"] for e in events)

    (table,) = read_operator_tables(profiles, "train")
    assert (table.task, table.steps, len(table.operators)) == ("train", 3, LISTED_OPERATORS)
    assert not any("(" in cost.name or cost.name.startswith("<") for cost in table.operators)
    assert sorted(table.shares, reverse=True) == table.shares
    assert 0 < sum(table.shares) <= 1
    # One row a layer, told apart by its shapes; either may be the slower one.
    products = [cost for cost in table.operators if cost.name == "aten::addmm"]
    layers = ("[[16], [16, 4], [4, 16]", "[[3], [16, 16], [16, 3]")
    assert products and all(cost.shapes.startswith(layers) for cost in products)
    linear = products[0]
    assert linear.calls == 3
    assert linear.self_mebibytes is not None and linear.self_device_ms is None
    assert 0 < linear.self_cpu_ms <= linear.cpu_ms


def test_a_table_of_operators_does_not_outlive_its_training(tmp_path, source):
    traced = {"epochs": 1, "batch_size": 16, "profile": {"trace": 1}}
    Train(**traced)(source, context(tmp_path / "train"))
    assert len(read_operator_tables(tmp_path / "profiles", "train")) == 1
    Train(epochs=1, batch_size=16)(source, context(tmp_path / "train"))
    assert read_operator_tables(tmp_path / "profiles", "train") == ()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_every_rank_is_traced_and_measured(tmp_path, source, caplog):
    stage = Train(epochs=2, batch_size=16, parallel={"processes": 2}, profile={"trace": 2})
    with caplog.at_level(logging.INFO, "compress.training.fit"):
        stage(source, context(tmp_path / "train"))
    for rank in (0, 1):
        assert steps_in(tmp_path / "profiles" / "train" / f"trace-rank{rank}.json") == 2
    costs = [m.partition("peak MiB by rank: ")[2] for m in caplog.messages if "peak MiB" in m]
    assert len(costs) == 2
    assert all(len(cost.split()) == 2 and min(map(float, cost.split())) > 0 for cost in costs)


def test_too_few_steps_to_trace_give_a_warning(tmp_path, source, caplog):
    Train(epochs=1, batch_size=96, profile={"trace": 2})(source, context(tmp_path / "train"))
    assert "too few steps to record" in caplog.text
    assert not (tmp_path / "profiles").exists()


def test_a_memory_snapshot_is_of_cuda_alone(tmp_path, source):
    with pytest.raises(Unavailable, match=r"^train: profile\.memory: needs a CUDA device and"):
        Train(epochs=1, profile={"memory": True})(source, context(tmp_path / "train"))
    assert not (tmp_path / "train.work").exists()


def batch(inputs: torch.Tensor) -> Batch:
    return Batch((inputs,), None)


def test_tokens_are_counted_for_integer_inputs_by_batch_and_length():
    assert tokens_in(batch(torch.zeros(3, 5, dtype=torch.int64))) == 15
    assert tokens_in(batch(torch.zeros(3, 5))) == 0
    assert tokens_in(batch(torch.zeros(3, dtype=torch.int64))) == 0
    assert tokens_in(batch(torch.zeros(3, 5, dtype=torch.bool))) == 0


class Pair(Strategy):
    """The leading one of two processes, the other of which, if it has samples of its own, saw twice
    as many tokens."""

    def __init__(self, ranks):
        self.ranks = ranks

    def sum_over_ranks(self, values):
        return [value + 2 * value * (self.ranks - 1) for value in values]

    def gather_all(self, value):
        return [value, 7.0]


@pytest.mark.parametrize("shares", [1, 2])
def test_speed_and_memory_are_those_of_all_processes(monkeypatch, shares):
    """Processes that share a model, and not the batch, count once."""

    class Here:
        device = "cpu"

    clock = iter((10.0, 12.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    metrics = StepMetrics(Here, Pair(shares))
    steps = [[batch(torch.zeros(4, 10, dtype=torch.int64))] * 2] * 3
    assert list(metrics.timed(steps)) == steps
    # mapped anew, as what malloc returns may be pages that are resident already
    with mmap.mmap(-1, 64 * 2**20) as mapped:
        mapped.write(b"1" * len(mapped))
        epoch = metrics.of_epoch(Epoch(epoch=1, loss=1.0, metric=0.5, learning_rate=0.1))
    assert epoch.samples_per_second == shares * 24 / 2
    assert epoch.tokens_per_second == (240 + 480 * (shares - 1)) / 2
    assert epoch.peak_mebibytes[0] >= 64 * 0.9 and epoch.peak_mebibytes[1] == 7
    assert EpochMetrics.model_validate_json(epoch.model_dump_json()) == epoch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_memory_snapshot_knows_the_allocations(tmp_path):
    file = tmp_path / "profiles" / "memory.pickle"
    with recording_memory(file):
        held = torch.ones(2**20, device="cuda")
    content = file.read_bytes()
    assert held.is_cuda and b"segments" in content and b"device_traces" in content
