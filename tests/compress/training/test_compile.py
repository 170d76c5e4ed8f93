"""Compiled models are trained to the weights of those that are not."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.common.errors import StageFailed, Unavailable
from compress.core.context import Context
from compress.data.splits import DataReference
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss
from compress.training.optim.transformer_blocks import compile_, matmul_precision
from tests.compress.training.builders import import_net

HERE = Path(__file__).parent

# 10 steps in fp32: fused kernels round in other places.
TOLERANCE = 1e-5
COMMON = {"clip_norm": 0.1, "activation_blocks": ["Block"], "data": "nets:even"}
# A last batch of another size has all that is not trained compiled once more: once is enough.
RAGGED = {"data": "nets:uneven"}
FSDP = {"strategy": "fsdp", "wrap": ["Block"]}
ALONE = {
    "plain": {},
    "plain ragged": RAGGED,
    "blocks ragged": {**RAGGED, "compile": "blocks"},
}
TOGETHER = {
    "ddp-whole": {"compile": "whole"},
    "fsdp-whole": {"compile": "whole", "parallel": FSDP},
    "fsdp-selective": {
        "compile": "blocks", "activation_checkpointing": "selective", "parallel": FSDP
    },
}  # fmt: skip
TRACED = {"fsdp-traced": {**TOGETHER["fsdp-selective"], "backend": "aot_eager_decomp_partition"}}
"""Whose ranks trace and divide graphs as the others', and write no kernels, for half the time."""


def import_blocks(path):
    return import_net(path, "nets:blocks", depth=2)


def results(root, trained, launch, names):
    """Train alone, and on two ranks with DDP and FSDP; return the states by name."""
    import_blocks(root / "source")
    alone, together = (
        {name: {**COMMON, **settings} for name, settings in trainings.items() if name in names}
        for trainings in (ALONE, TOGETHER | TRACED)
    )
    launch(HERE / "train_on_ranks.py", 2, root, json.dumps(alone), json.dumps(together))
    return {name: trained(root / name) for name in (*alone, *together)}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "names",
    [
        [*ALONE, *TRACED],
        # CI has kernels of one process, and traced blocks with shards.
        pytest.param(["plain", *TOGETHER], marks=pytest.mark.soak),
    ],
    ids=["each kind", "together"],
)
def test_compiled_models_reach_the_weights_of_others(tmp_path, trained, launch, names):
    found = results(tmp_path, trained, launch, names)
    expected = found["plain"].weights
    for name, state in found.items():
        assert state.weights.keys() == expected.keys()
        difference = max(float((state.weights[k] - expected[k]).abs().max()) for k in expected)
        assert difference < TOLERANCE, name
        same = found["plain ragged" if name.endswith("ragged") else "plain"]
        assert [e.metric for e in state.history] == [e.metric for e in same.history]


# Importing the compiler, torch 2.13 warns of itself.
of_torch = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@of_torch
@pytest.mark.parametrize(
    ("setting", "compiled"),
    [
        ("none", []),
        ("whole", [""]),
        ("blocks", ["0", "1"]),
        ({"what": "whole", "mode": "max-autotune"}, [""]),
        ({"fullgraph": True}, ["0", "1"]),
    ],
)
def test_the_named_parts_are_compiled_and_names_stay(setting, compiled):
    module = nn.Sequential(Block(), Block())
    names = list(module.state_dict())
    compile_(module, Training(epochs=1, compile=setting))
    found = [n for n, part in module.named_modules() if part._compiled_call_impl is not None]
    assert found == compiled
    assert list(module.state_dict()) == names
    assert [name for name, _ in module.named_parameters()] == names


def test_options_are_those_of_torch_compile(monkeypatch):
    given = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: given.append(options))
    settings = {"what": "whole", "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    for setting in (settings, "whole"):
        compile_(nn.Linear(2, 2), Training(epochs=1, compile=setting))
    assert given == [{"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}, {}]


def test_precision_of_products_is_for_the_training_alone():
    before = torch.get_float32_matmul_precision()
    training = Training(epochs=1, matmul_precision="high")
    with pytest.raises(KeyError), matmul_precision(training):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before
    assert training.model_dump()["matmul_precision"] == "high"


def test_new_settings_at_their_defaults_change_no_cache_key():
    settings = Training(epochs=1).model_dump(mode="json")
    assert "matmul_precision" not in settings and settings["compile"] == "none"
    assert not {"find_unused_parameters", "gradient_as_bucket_view"} & set(settings["parallel"])


def test_a_model_without_blocks_is_refused():
    with pytest.raises(StageFailed, match=r"^compile: blocks: the model has no repeated blocks"):
        compile_(nn.Linear(2, 2), Training(epochs=1, compile="blocks"))


def test_a_missing_compiler_is_an_error_before_training(tmp_path, monkeypatch):
    compiled = Training(epochs=1, compile="whole")
    monkeypatch.setenv("PATH", str(tmp_path))
    data = DataReference("nets:uneven", {}, HERE, 16).load()
    where = Context(root=tmp_path / "out", data=data)
    message = r"^train: compile: needs g\+\+, which is not installed; .* or set compile: none$"
    with pytest.raises(Unavailable, match=message):
        fit(import_blocks(tmp_path / "source"), compiled, TargetLoss(), where, "train")
    (unmet,) = compiled.unmet_by(where)
    assert unmet.is_program, "a plan warns of it, as it may be installed before the stage begins"
    assert not [*Training(epochs=1).unmet_by(where)]
