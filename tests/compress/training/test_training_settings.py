import subprocess
import sys

import pytest
from pydantic import ValidationError

from compress.artifacts.eager_model import EagerModel
from compress.common.config import descriptions
from compress.training.config.training import DEFAULT_LEARNING_RATE, Training
from compress.training.stage import Train


def test_epochs_alone_is_enough():
    training = Training(epochs=3)
    assert (training.optimizer, training.schedule, training.keep) == ("sgd", "onecycle", "best")
    assert training.peak_learning_rate == 0.1
    assert Training(epochs=3, optimizer="adamw").peak_learning_rate == 2e-3
    assert Training(epochs=3, weight_decay=0).weight_decay_or_default == 0


def test_a_batch_that_does_not_divide_is_refused_with_the_sizes_that_do():
    with pytest.raises(ValidationError, match="does not divide over 3 processes; use 63 or 66"):
        Training(epochs=1, parallel={"processes": 3})


def test_parts_of_a_step_must_divide_it():
    with pytest.raises(ValidationError, match="over 2 processes in 3 parts each; use 60 or 66"):
        Training(epochs=1, accumulate=3, parallel={"processes": 2})


def test_an_optimizer_is_named_as_in_torch_and_a_near_miss_is_helped():
    import torch

    assert Training(epochs=1, optimizer="AdamW").optimizer == "adamw"
    with pytest.raises(ValidationError, match="unknown optimizer 'adamww'; did you mean 'adamw'"):
        Training(epochs=1, optimizer="adamww")
    unusable = {"Optimizer", "LBFGS", "SparseAdam"}
    found = {n: getattr(torch.optim, n) for n in torch.optim.__all__ if n not in unusable}
    classes = {name.lower() for name, value in found.items() if isinstance(value, type)}
    assert set(DEFAULT_LEARNING_RATE) == classes


def test_unknown_settings_and_strategies_are_refused():
    with pytest.raises(ValidationError, match="epoch"):
        Train(epoch=1)
    with pytest.raises(ValidationError, match="strategy"):
        Train(epochs=1, parallel={"strategy": "magic"})


def test_the_stage_says_what_it_reads_and_its_settings_travel_without_it():
    stage = Train(epochs=2, name="again", label_smoothing=0.1)
    assert Train.reads() is EagerModel and Train.writes() is EagerModel
    assert stage.title == "again" and stage.uses_data
    assert stage.hyper_parameters() == Training(epochs=2, label_smoothing=0.1)
    assert type(stage.hyper_parameters()) is Training


def test_settings_are_documented_and_importing_the_stages_leaves_torch_alone():
    for stage in (Train,):
        assert stage.model_fields.keys() - descriptions(stage).keys() <= {"stage"}
    code = (
        "import sys, compress.training.stage, compress.training.objectives.objective, "
        "compress.distillation.stage; "
        "sys.exit(str([m for m in ('torch', 'onnx', 'onnxruntime') if m in sys.modules]) "
        "if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"strategy": "fsdp", "shard_processes": 2}, "shard_processes is for .* hybrid_shard"),
        ({"strategy": "zero2", "sharding": "no_shard"}, "zero2 says what is sharded"),
        ({"prefetch": 1}, "prefetch is for strategy: fsdp, zero2, zero3, found ddp"),
        (
            {"strategy": "fsdp", "sharding": "hybrid_shard", "processes": 4, "shard_processes": 3},
            "groups of 3 do not divide 4 processes",
        ),
    ],
)
def test_sharding_that_cannot_be_is_refused(parallel, message):
    with pytest.raises(ValidationError, match=message):
        Training(epochs=1, parallel=parallel)


def test_a_budget_is_for_selective_checkpointing_alone():
    chosen = {"activation_budget": 0.3}
    Training(epochs=1, activation_checkpointing="selective", **chosen)
    with pytest.raises(ValidationError, match=r"is for activation_checkpointing: selective, found"):
        Training(epochs=1, activation_checkpointing="full", **chosen)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"parallel": {"strategy": "zero3", "processes": 2}}, "found 2 processes, zero3"),
        ({"parallel": {"pipeline": {}, "processes": 2}}, "found 2 processes, ddp, 2 stages"),
        ({"compile": "blocks"}, "found compile: blocks"),
    ],
)
def test_segments_are_for_weights_that_are_all_there(settings, found):
    with pytest.raises(ValidationError, match=f"activation_checkpointing: segments .*{found}"):
        Training(epochs=1, activation_checkpointing={"segments": 4}, **settings)


def test_names_of_sharding_mean_what_they_say():
    modes = {
        strategy: Training(epochs=1, parallel={"strategy": strategy}).parallel.sharding_mode
        for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3", "dp")
    }
    assert modes == {
        "ddp": None,
        "fsdp": "full_shard",
        "zero1": None,
        "zero2": "shard_grad_op",
        "zero3": "full_shard",
        "dp": None,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parallel": {"cpu_offload": True}}, "cpu_offload is for strategy: fsdp, .* found ddp"),
        ({"parallel": {"wrap": ["Block"]}}, "wrap is for strategy: fsdp, .* found ddp"),
        ({"parallel": {"strategy": "zero2", "static_graph": True}}, "static_graph is for strategy"),
        ({"parallel": {"topk_fraction": 0.5}}, "topk_fraction is for communication: topk"),
        ({"parallel": {"communication": "int8"}}, "int8 is for several processes, found one"),
        ({"parallel": {"rendezvous": "a:1"}}, "rendezvous was removed, as torchrun and srun say"),
        ({"parallel": {"nodes": 2, "strategy": "dp"}}, "dp runs as one process"),
        (
            {"batch_size": 64, "parallel": {"nodes": 3, "processes": 2}},
            "batch_size 64 does not divide over 6 processes",
        ),
        (
            {"parallel": {"processes": 2, "communication": "topk"}, "on_nan": "skip"},
            "topk remembers gradients, those of a step that on_nan: skip leaves out",
        ),
        ({"optimizer_arguments": {"lr": 3}}, "lr is set by learning_rate"),
        ({"min_learning_rate": 0.01}, "min_learning_rate is for schedule: cosine.*found onecycle"),
        ({"schedule": "linear", "schedule_power": 2}, "schedule_power is for schedule: poly"),
        (
            {"schedule": "cosine", "learning_rate": 0.1, "min_learning_rate": 0.2},
            "min_learning_rate 0.2 is not below the learning_rate 0.1",
        ),
        (
            {"optimizer": "rprop", "parallel": {"strategy": "fsdp"}},
            "rprop needs whole weights, which fsdp",
        ),
        ({"parallel": {"strategy": "dp", "tensor": 2, "processes": 2}}, "found dp"),
    ],
)
def test_what_would_be_ignored_or_fail_later_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Training(epochs=1, **settings)


def test_a_layout_names_what_changes_a_result():
    ways = [
        {},
        {"strategy": "fsdp"},
        {"strategy": "zero2"},
        {"communication": "topk"},
        {"communication": "powersgd"},
        {"communication": "powersgd", "powersgd_rank": 2},
        {"tensor": 2},
        {"pipeline": {}},
        {"sync_batchnorm": True},
    ]
    layouts = {Training(epochs=1, parallel={**w, "processes": 2}).parallel.layout for w in ways}
    assert len(layouts) == len(ways)
    assert "2 processes, fsdp, full_shard" in layouts
