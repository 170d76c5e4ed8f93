"""Which matrices are cut and which blocks go where, and what is refused before any process runs."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compress.common.errors import StageFailed
from compress.training.config.parallel import Parallel
from compress.training.config.training import Training
from compress.training.model_parallel.pipeline_parallel import split_into_parts, strip_
from compress.training.model_parallel.tensor_parallel import (
    require_divisible,
    tensor_parallel_plan,
)


class Layers(nn.Module):
    """Named linear layers below one parent."""

    def __init__(self, *names: str, width: int = 8, **numbers: int) -> None:
        super().__init__()
        for name in names:
            *parents, own = name.split(".")
            place = self
            for parent in parents:
                if not hasattr(place, parent):
                    place.add_module(parent, nn.Module())
                place = getattr(place, parent)
            place.add_module(own, nn.Linear(width, width))
        for name, number in numbers.items():
            setattr(self, name, number)


class Chain(nn.Module):
    """Blocks in a row between a stem and a head."""

    def __init__(self, depth: int = 5, twice: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(depth))
        self.spare = nn.Linear(8, 2)
        self.last = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(block(x)) if self.twice else block(x)
        return self.head(self.last(x))


def tensor(ranks=2, **plan):
    return Parallel(tensor=ranks, processes=ranks, tensor_plan=plan)


def pipeline(**settings):
    stages = settings.get("stages", 2)
    return Parallel(processes=stages, pipeline=settings).pipeline


def message(raised):
    return str(raised.value.errors()[0]["ctx"]["error"])


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("q_proj k_proj v_proj", "o_proj"),
        ("wq wk wv", "wo"),
        ("to_q to_k to_v", "to_out.0"),
        ("self.query self.key self.value", "output.dense"),
        ("gate_proj up_proj", "down_proj"),
        ("fc1", "fc2"),
        ("c_fc", "c_proj"),
        ("w1 w3", "w2"),
        ("linear1", "linear2"),
        ("intermediate.dense", "output.dense"),
    ],
)
def test_conventional_names_are_found(columns, row):
    block = Layers(*columns.split(), row, "other")
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    expected = {f"layers.0.{name}": "column" for name in columns.split()}
    assert tensor_parallel_plan(model, tensor()) == {**expected, f"layers.0.{row}": "row"}


def test_fused_projections_and_torch_s_own_attention_stay_whole():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert tensor_parallel_plan(layer, tensor()) == {"linear1": "column", "linear2": "row"}
    with pytest.raises(StageFailed, match=r"no attention or feed-forward .*tensor_plan, e\.g\. "):
        tensor_parallel_plan(Layers("c_attn", "c_proj"), tensor())


def test_a_plan_names_linear_layers_by_pattern():
    model = nn.Sequential(Layers("first", "second"), Layers("first", "second"))
    plan = {"*.first": "column", "*.second": "row"}
    assert tensor_parallel_plan(model, tensor(**plan)) == {
        "0.first": "column",
        "1.first": "column",
        "0.second": "row",
        "1.second": "row",
    }
    with pytest.raises(StageFailed, match=r"matches '\*\.frist'; did you mean '\*\.first'\?"):
        tensor_parallel_plan(model, tensor(**{"*.frist": "column"}))
    with pytest.raises(StageFailed, match=r"'0' is a Layers, expected a Linear"):
        tensor_parallel_plan(model, tensor(**{"0": "column"}))


def test_what_does_not_divide_is_refused():
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    odd = nn.ModuleDict({"attn": Layers(*names, width=9)})
    with pytest.raises(StageFailed, match=r"'attn.q_proj' has 9 outputs, .* not divide over 2"):
        require_divisible(odd, tensor_parallel_plan(odd, tensor()), 2)
    heads = nn.ModuleDict({"attn": Layers(*names, width=12, num_heads=6, n_kv_heads=3, head_dim=2)})
    plan = tensor_parallel_plan(heads, tensor())
    require_divisible(heads, plan, 3)
    with pytest.raises(StageFailed, match=r"'attn' has 3 heads \(n_kv_heads\), .* over 2 proc"):
        require_divisible(heads, plan, 2)


def test_blocks_are_divided_evenly_and_weights_follow_their_use():
    model = Chain()
    found = split_into_parts(model, pipeline(), (torch.randn(3, 4),))
    assert found.split_points == ["blocks.2"]
    first = ("stem", "norm", "blocks.0.0", "blocks.1.0")
    expected = {f"{module}.{name}" for module in first for name in ("weight", "bias")}
    assert {name for name, parts in found.weights.items() if parts == {0}} == expected
    assert found.weights["spare.weight"] == {1}  # nobody uses it
    assert found.buffers["norm.running_mean"] == {0} and found.buffers["last.running_var"] == {1}
    assert set(found.blocks) == {f"blocks.{i}" for i in range(5)}


def test_weights_of_other_parts_take_no_memory():
    model = Chain()
    names = set(model.state_dict())
    found = split_into_parts(model, pipeline(), (torch.randn(3, 4),))
    strip_(model, found, {1}, torch.device("cpu"))
    assert set(model.state_dict()) < names and "norm.running_mean" not in model.state_dict()
    assert model.stem.weight.shape == (8, 4)
    assert model.stem.weight.untyped_storage().nbytes() == 4


def test_split_points_are_named_modules():
    model = Chain()
    found = split_into_parts(model, pipeline(split=["last"]), (torch.randn(3, 4),))
    assert found.weights["blocks.4.0.weight"] == {0} and found.weights["head.weight"] == {1}
    with pytest.raises(StageFailed, match=r"no module 'blocks\.9'; did you mean 'blocks\.\d'"):
        split_into_parts(model, pipeline(split=["blocks.9"]), (torch.randn(3, 4),))
    with pytest.raises(StageFailed, match=r"'spare' is never called"):
        split_into_parts(model, pipeline(split=["spare"]), (torch.randn(3, 4),))


def test_a_model_that_is_no_chain_of_blocks_is_refused():
    x = (torch.randn(3, 4),)
    with pytest.raises(StageFailed, match=r"'blocks\.2' is called twice"):
        split_into_parts(Chain(twice=True), pipeline(), x)
    with pytest.raises(StageFailed, match=r"3 repeated blocks do not fill 4 parts"):
        split_into_parts(Chain(3), pipeline(stages=4), x)
    with pytest.raises(StageFailed, match=r"no repeated blocks; .* pipeline\.split"):
        split_into_parts(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), pipeline(), x)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"tensor": 2, "processes": 3}, "3 processes do not divide into groups of 2"),
        ({"tensor": 2}, "1 processes do not divide into groups of 2"),
        ({"tensor_plan": {"a": "row"}}, "tensor_plan is for tensor above 1"),
        ({"tensor": 2, "processes": 2, "strategy": "zero1"}, "go with strategy: ddp, fsdp"),
        (
            {"tensor": 2, "processes": 2, "strategy": "fsdp", "sharding": "no_shard"},
            "no_shard does not go with tensor",
        ),
        ({"pipeline": {}, "processes": 2, "static_graph": True}, "static_graph does not go"),
        ({"pipeline": {}, "processes": 2, "communication": "fp16"}, "communication does not go"),
        ({"pipeline": {"microbatches": 1}, "processes": 2}, "needs a micro-batch for each of 2"),
        (
            {"pipeline": {"schedule": "interleaved_1f1b", "microbatches": 5}, "processes": 2},
            "in rounds of 2",
        ),
        (
            {
                "pipeline": {"schedule": "interleaved_zero_bubble", "microbatches": 5},
                "processes": 2,
            },
            "interleaved_zero_bubble takes micro-batches in rounds of 2",
        ),
        (
            {"pipeline": {"schedule": "zbv_zero_bubble"}, "processes": 2, "strategy": "zero3"},
            "that strategy: zero3 has freed by then; use ddp",
        ),
        ({"pipeline": {"split": ["a", "b"]}, "processes": 2}, "has 2 names and 2 parts have 1"),
    ],
)
def test_settings_that_do_not_go_together(parallel, expected):
    with pytest.raises(ValidationError) as raised:
        Parallel(**parallel)
    assert expected in message(raised)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"accumulate": 2}, "accumulate does not go with pipeline"),
        ({"precision": "fp16"}, "fp16 does not go with tensor or pipeline; use bf16"),
        ({"batch_size": 6}, "batch_size 6 does not divide into 4 micro-batches for each of 1"),
    ],
)
def test_training_that_does_not_go_with_a_pipeline(settings, expected):
    with pytest.raises(ValidationError) as raised:
        Training(epochs=1, parallel={"pipeline": {}, "processes": 2}, **settings)
    assert expected in message(raised)


def test_zero_bubble_does_not_go_with_recomputed_activations():
    parallel = {"pipeline": {"schedule": "zbv_zero_bubble"}, "processes": 2}
    with pytest.raises(ValidationError, match="zbv_zero_bubble, which goes back"):
        Training(epochs=1, parallel=parallel, activation_checkpointing="full")


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", [0, 1]),
        ("interleaved_1f1b", [0, 1, 0, 1]),
        ("looped_bfs", [0, 1, 0, 1]),
        ("interleaved_zero_bubble", [0, 1, 0, 1]),
        ("zbv_zero_bubble", [0, 1, 1, 0]),
    ],
)
def test_a_schedule_says_which_stage_has_a_part(schedule, stages):
    settings = pipeline(schedule=schedule)
    assert [settings.stage_of(part) for part in range(settings.parts)] == stages


def test_only_the_remaining_factor_shares_the_batch():
    parallel = Parallel(processes=8, tensor=2, pipeline={"stages": 2})
    assert (parallel.ranks, parallel.model_ranks, parallel.replicas) == (8, 4, 2)
    assert Training(epochs=1, batch_size=8, parallel=parallel).batch_size == 8
