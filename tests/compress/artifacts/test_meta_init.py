from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.meta_init import build_skeleton
from compress.artifacts.recipe import KeepIndices, Recipe
from compress.checkpoint.loading import consolidate, read_state_dict
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature, TensorSpec

HERE = Path(__file__).parent
SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3)),))
TIED = Recipe(factory="skeletons:tied")


@pytest.fixture
def source(tmp_path: Path) -> EagerModel:
    return import_checkpoint(
        tmp_path / "source", TIED, SIGNATURE, checkpoint=None, folder=HERE, seed=3
    )


def test_a_skeleton_has_ties_and_buffers_and_no_weights() -> None:
    module = build_skeleton(TIED, HERE)
    assert module is not None and all(p.is_meta for p in module.parameters())
    assert module.head.weight is module.embedding.weight
    assert module.first.bias is module.second.bias
    assert module.memory._flat_weights[0] is module.memory.weight_ih_l0
    assert torch.equal(module.positions, torch.arange(5.0))
    assert torch.equal(module.norm.running_var, torch.ones(4))
    real = TIED.build(HERE)
    assert [(n, p.shape, p.requires_grad) for n, p in module.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in real.named_parameters()
    ]
    assert not any(p.is_meta for p in nn.Linear(2, 2).parameters())


def test_edits_are_replayed_on_a_skeleton() -> None:
    kept = (0, 2, 3)
    edit = KeepIndices(kept={"first.weight": {0: kept}, "second.weight": {1: kept}})
    module = build_skeleton(Recipe(factory="skeletons:tied", edits=(edit,)), HERE)
    assert module is not None
    assert module.first.out_features == module.second.in_features == 3
    assert module.first.weight.is_meta and module.first.weight.shape == (3, 4)


@pytest.mark.parametrize(
    ("factory", "arguments", "why"),
    [
        ("scaled", {}, "item"),
        ("derived", {"kind": "buffer"}, "norm is computed from weights"),
        ("derived", {"kind": "list"}, "norms is computed from weights"),
    ],
)
def test_what_needs_values_is_not_built_without(factory, arguments, why, caplog) -> None:
    recipe = Recipe(factory=f"skeletons:{factory}", arguments=arguments)
    with caplog.at_level("INFO", "compress"):
        assert build_skeleton(recipe, HERE) is None
    assert f"skeletons:{factory} is built with its weights: " in caplog.text
    assert why in caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["memory", "file", "distributed"])
def test_weights_on_disk_give_the_digest_of_the_module(source, tmp_path, kind) -> None:
    module = source.load()
    with torch.no_grad():
        module.head.weight.add_(1)
        module.norm.running_mean.add_(2)
    expected = source.derive(tmp_path / "expected", module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if kind != "memory":
        dcp.save({"model": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
        state = read_state_dict(tmp_path / "saved")
    if kind == "file":
        consolidate(tmp_path / "saved", tmp_path / "all.safetensors")
        state = read_state_dict(tmp_path / "all.safetensors")
    found = source.derive(tmp_path / "found", state)
    assert found.digest == expected.digest
    assert torch.equal(found.load().head.weight, module.embedding.weight)


def test_weights_in_another_precision_take_the_modules(source, tmp_path) -> None:
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in _state(source).items()}
    found = source.derive(tmp_path / "found", half)
    whole = source.load()
    whole.load_state_dict(half)
    assert found.digest == source.derive(tmp_path / "expected", whole).digest


def test_other_weights_are_refused(source, tmp_path) -> None:
    state = dict(_state(source))
    state["more"] = state.pop("second.weight")
    with pytest.raises(ArtifactInvalid, match=r"missing second\.weight; unexpected more"):
        source.derive(tmp_path / "found", state)
    assert not (tmp_path / "found").exists()


def _state(model: EagerModel) -> dict[str, torch.Tensor]:
    return model.load().state_dict()
