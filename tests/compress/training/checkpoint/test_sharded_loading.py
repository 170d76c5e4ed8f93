"""A model that is to be sharded is built without weights; each rank reads its own part."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import load_sealed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.training.checkpoint import DeferredWeights, _read_shard
from compress.training.config.training import Training
from compress.training.fit import fit
from compress.training.objectives.objective import TargetLoss
from tests.compress.training.builders import import_net, load_data

pytestmark = pytest.mark.multiprocess

HERE = Path(__file__).parents[1]
NETS = HERE.parent / "artifacts"


def sealed(path, factory, features, **arguments):
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", features)),))
    recipe = Recipe(factory=f"skeletons:{factory}", arguments=arguments)
    return import_checkpoint(path, recipe, signature, checkpoint=None, folder=NETS, seed=3)


@pytest.fixture(scope="module")
def found(tmp_path_factory, launch):
    """Load in every way on two ranks; return what each found, and the model."""
    folder = tmp_path_factory.mktemp("fill")
    source = sealed(folder / "source", "tied", 3, width=5)  # no rank has as much as another
    sealed(folder / "scaled", "scaled", 4)
    launch(HERE / "sharded_loading_ranks.py", 2, folder)
    return source, [torch.load(folder / f"rank-{r}.pt", weights_only=True) for r in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["full", "whole", "none", "hybrid", "offload"])
def test_each_rank_has_its_part_of_the_weights(found, setting):
    source, ranks = found
    module = source.load()
    answer = module(torch.arange(6.0).reshape(2, 3))
    expected, first = module.state_dict(), ranks[0][setting]["state"]
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) for name in expected)
    whole = sum(p.nbytes for p in module.parameters())
    held = [rank[setting]["local_bytes"] for rank in ranks]
    assert sum(held) == (2 * whole if setting == "none" else whole)
    for rank in (rank[setting] for rank in ranks):
        assert all(rank["on_meta"]) and rank["tied"]
        assert rank["parameters"] == len(list(module.parameters()))
        assert torch.equal(rank["buffers"]["positions"], torch.arange(5.0))
        torch.testing.assert_close(rank["answer"], answer)


@pytest.mark.slow
def test_a_factory_that_needs_values_is_loaded_whole(found):
    for rank in found[1]:
        assert rank["needs values"]["on_meta"] == [False, False]
        assert rank["needs values"]["parameters"] == 2


def test_weights_of_another_model_are_refused(tmp_path):
    model = sealed(tmp_path / "source", "tied", 3)
    state = model.load().state_dict()
    del state["head.weight"], state["first.bias"], state["second.weight"]
    model.payload_path.unlink()
    save_file(state, model.payload_path)
    manifest, raw = tmp_path / "source" / "manifest.json", model.payload_path.read_bytes()
    content = load_sealed(manifest.read_bytes())  # sealed with these weights, by another toolkit
    digest = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    content["files"]["weights.safetensors"] = digest
    manifest.unlink()
    manifest.write_text(json.dumps(content, sort_keys=True, indent=1))
    with pytest.raises(ArtifactInvalid, match=r"weights\.safetensors: missing second\.weight$"):
        DeferredWeights.from_model(EagerModel.from_directory(tmp_path / "source"), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "settings", [{}, {"cpu_offload": True}, {"wrap": ["Block"], "prefetch": 1}]
)
def test_parts_are_read_onto_the_device(tmp_path, settings):
    source, data = import_net(tmp_path / "source", "nets:blocks"), load_data("uneven")
    parallel = {"strategy": "fsdp", **settings}
    states = []
    for device, more in (("cpu", {}), ("cuda:0", {"parallel": parallel})):
        training = Training(epochs=4, batch_size=16, learning_rate=0.01, keep="last", **more)
        where = Context(root=tmp_path / device[:3], data=data, device=device)
        states.append(fit(source, training, TargetLoss(), where, "train").module.state_dict())
    # 20 steps in fp32, in which another device rounds in other places.
    assert max(float((states[0][k] - states[1][k]).abs().max()) for k in states[0]) < 1e-3


def test_an_offloaded_shard_stays_in_main_memory(tmp_path):
    model = sealed(tmp_path / "source", "tied", 3)
    name, weight = next(iter(model.load().state_dict().items()))
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    empty = torch.empty_like(weight, device="meta")
    tensor_meta = TensorMeta(empty.shape, empty.stride(), empty.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=tensor_meta)
    sharded = DTensor(empty, spec, requires_grad=False)
    shard = _read_shard(model.payload_path, name, sharded, "cpu")
    assert torch.equal(shard._local_tensor, weight)
    assert shard.device_mesh is mesh and shard.placements == (Shard(0),)


def test_tied_weights_stay_tied_in_a_module_that_is_not_sharded(tmp_path):
    model = sealed(tmp_path / "source", "tied", 3)
    module, deferred = DeferredWeights.from_model(model, "cpu")
    whole = model.load().state_dict()
    with deferred.mapped(module):
        assert module.head.weight is module.embedding.weight
        assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
    assert module.head.weight is module.embedding.weight and module.head.weight.is_meta
    deferred.fill_(module, offloaded=False)
    assert module.head.weight is module.embedding.weight
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
