"""Normalization layers over several processes: synchronized statistics, and float32 in FSDP."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.training.distributed.ddp import synchronize_batch_norm_
from tests.compress.training import sync_batchnorm_ranks
from tests.compress.training.builders import import_net

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).parent

TOLERANCE = 1e-5
"""As in test_strategies.py; sums are added up in another order."""
COMMON = {"epochs": 1, "data": "nets:even", "learning_rate": 0.01}
FSDP = {"strategy": "fsdp", "wrap": ["Linear"]}
SYNC = {"sync_batchnorm": True}
SYNCHRONIZED = {"ddp": {}, "zero1": {"strategy": "zero1"}, "fsdp": FSDP}
SHARDED = {
    "full": FSDP,
    "shard_grad_op": {**FSDP, "sharding": "shard_grad_op"},
    "hybrid": {**FSDP, "sharding": "hybrid_shard"},
    "no_shard": {**FSDP, "sharding": "no_shard"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3", "wrap": ["BatchNorm1d"]},
}
TENSOR = {"tensor": 2, "tensor_plan": {"up": "column", "down": "row"}}
ALONE = {"alone": COMMON, "alone-parts": {**COMMON, "accumulate": 2}}
BF16 = {**COMMON, "precision": "bf16"}
TOGETHER = {
    **{name: {**COMMON, "parallel": {**p, **SYNC}} for name, p in SYNCHRONIZED.items()},
    "parts": {**COMMON, "accumulate": 2, "parallel": SYNC},
    "separate": COMMON,
    "bf16-ddp": BF16,
    **{f"bf16-{name}": {**BF16, "parallel": parallel} for name, parallel in SHARDED.items()},
    "bf16-gathered-fp32": {**BF16, "parallel": {**FSDP, "param_dtype": "fp32"}},
    "reduced-bf16": {**COMMON, "parallel": {**FSDP, "reduce_dtype": "bf16"}},
    "bf16-tensor-ddp": {**BF16, "parallel": TENSOR},
    "bf16-tensor-fsdp": {**BF16, "parallel": {**TENSOR, **FSDP}},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, trained, launch):
    root = tmp_path_factory.mktemp("norms")
    torch.manual_seed(0)
    import_net(root / "source", "nets:normalized")
    launch(HERE / "train_on_ranks.py", 2, root, json.dumps(ALONE), json.dumps(TOGETHER))
    return {name: trained(root / name) for name in (*ALONE, *TOGETHER)}


def largest_difference(one, other):
    assert one.weights.keys() == other.weights.keys()
    return max(float((one.weights[n] - other.weights[n]).abs().max()) for n in one.weights)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SYNCHRONIZED)
def test_synchronized_statistics_give_the_weights_of_one_process(results, strategy):
    alone, together = results["alone"], results[strategy]
    assert largest_difference(alone, together) < TOLERANCE
    assert [e.metric for e in together.history] == [e.metric for e in alone.history]


@pytest.mark.slow
def test_without_them_each_process_normalizes_its_own_share(results):
    assert largest_difference(results["alone"], results["separate"]) > 1e-3


@pytest.mark.slow
def test_parts_of_a_step_are_normalized_as_one_process_would(results):
    """BatchNorm sees a micro-batch of all processes, which is not the whole step."""
    assert largest_difference(results["alone-parts"], results["parts"]) < TOLERANCE
    whole, parts = (results[name].weights["batch_norm.running_var"] for name in ("alone", "parts"))
    assert (whole - parts).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDED)
def test_norms_of_sharded_bf16_models_stay_float32(results, sharding):
    """The weights are those of ddp, where autocast leaves norms in float32."""
    assert largest_difference(results["bf16-ddp"], results[f"bf16-{sharding}"]) < TOLERANCE


@pytest.mark.slow
def test_they_do_in_slices_too(results):
    assert largest_difference(results["bf16-tensor-ddp"], results["bf16-tensor-fsdp"]) < TOLERANCE


@pytest.mark.slow
def test_weights_gathered_in_fp32_are_evaluated_in_fp32(results):
    ddp, sharded = results["bf16-ddp"], results["bf16-gathered-fp32"]
    assert largest_difference(ddp, sharded) < TOLERANCE
    assert [e.metric for e in sharded.history] == [e.metric for e in ddp.history]


@pytest.mark.slow
def test_gradients_reduced_in_bf16_differ_by_its_rounding(results):
    """A bf16 number has 8 significant bits."""
    assert TOLERANCE < largest_difference(results["separate"], results["reduced-bf16"]) < 2**-8


@pytest.fixture(scope="module")
def layers(tmp_path_factory, launch):
    folder = tmp_path_factory.mktemp("layers")
    launch(HERE / "sync_batchnorm_ranks.py", 2, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sync_batchnorm_ranks.LAYERS)
def test_shares_of_any_size_and_shape_are_normalized_as_one_batch(layers, name):
    expected = sync_batchnorm_ranks.run(name, None)
    first, second = (rank[name] for rank in layers)
    assert expected.keys() == first.keys() == second.keys()
    for key, value in expected.items():
        if key.startswith(("outputs", "inputs")):
            found = torch.cat([first[key], second[key]])
        elif key.startswith("grad"):
            found = first[key] + second[key]
        else:
            found = first[key]
            torch.testing.assert_close(first[key], second[key], rtol=0, atol=0)
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)


def test_statistics_outside_of_layers_cannot_be_synchronized():
    class Exported(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("norm_running_mean", torch.zeros(3))

    with pytest.raises(StageFailed, match=r"sync_batchnorm: the model has running statistics but"):
        synchronize_batch_norm_(Exported(), None)
    synchronize_batch_norm_(nn.Linear(2, 2), None)


def test_classes_names_and_hooks_stay():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    before, seen = list(model.state_dict()), []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    synchronize_batch_norm_(model, None)
    assert type(model[1]) is nn.BatchNorm1d and list(model.state_dict()) == before
    expected = nn.functional.batch_norm(torch.ones(2, 3), torch.zeros(3), torch.ones(3))
    assert torch.equal(model.eval()[1](torch.ones(2, 3)), expected)
    assert seen == [1]
