import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint.loading import read_state_dict
from compress.checkpoint.safetensors_io import write_safetensors
from compress.checkpoint.state_dict import load_state_
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).state_dict()


def _import(tmp_path: Path, project: Path, checkpoint: Path) -> nn.Module:
    recipe = Recipe(factory="nets:mlp")
    model = import_checkpoint(
        tmp_path / "in", recipe, SIGNATURE, checkpoint=checkpoint, folder=project
    )
    return model.load()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {f"_orig_mod.{k}": v for k, v in s.items()},
        lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()},
    ],
)
def test_reads_the_usual_wrappings(tmp_path: Path, project: Path, wrap) -> None:
    file = tmp_path / "model.pt"
    torch.save(wrap(_state()), file)
    module = _import(tmp_path, project, file)
    assert all(torch.equal(module.state_dict()[k], v) for k, v in _state().items())


def test_reads_safetensors(tmp_path: Path, project: Path) -> None:
    save_file(_state(), tmp_path / "model.safetensors")
    module = _import(tmp_path, project, tmp_path / "model.safetensors")
    assert torch.equal(module.state_dict()["2.bias"], _state()["2.bias"])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    save_file(_state(), file) if suffix == ".safetensors" else torch.save(_state(), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ArtifactInvalid, match="truncated"):
        read_state_dict(file)


class _Planted:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_pickled_code_is_never_executed(tmp_path: Path) -> None:
    file, trace = tmp_path / "evil.pt", tmp_path / "executed"
    torch.save({"state_dict": _state(), "hook": _Planted(f"touch {trace}")}, file)
    with pytest.raises(ArtifactInvalid, match="never executed"):
        read_state_dict(file)
    assert not trace.exists()


def test_a_whole_pickled_module_is_refused(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(ArtifactInvalid, match=r"state_dict\(\)"):
        read_state_dict(tmp_path / "module.pt")


def test_another_models_weights_are_named(tmp_path: Path, project: Path) -> None:
    save_file(nn.Linear(4, 3).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(ArtifactInvalid, match=r"missing 0\.weight.*unexpected bias, weight"):
        _import(tmp_path, project, tmp_path / "other.safetensors")


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    with pytest.raises(ArtifactInvalid, match="no tensors"):
        read_state_dict(tmp_path / "empty.pt")
    with pytest.raises(ArtifactInvalid, match="no such file"):
        read_state_dict(tmp_path / "absent.pt")


def test_a_wrong_input_shape_is_named(tmp_path: Path, project: Path) -> None:
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 5)),))
    with pytest.raises(ArtifactInvalid, match=r"does not take x \[2, 5\] float32"):
        import_checkpoint(
            tmp_path / "in", Recipe(factory="nets:mlp"), signature, checkpoint=None, folder=project
        )


def test_a_model_that_answers_differently_when_loaded_again_is_refused(
    tmp_path: Path, project: Path
) -> None:
    (project / "drawn.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Drawn(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 3)\n"
        "        self.register_buffer('noise', torch.randn(3), persistent=False)\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) + self.noise\n"
    )
    torch.manual_seed(0)  # with which the model is built, too
    with pytest.raises(ArtifactInvalid, match="answers differently"):
        import_checkpoint(
            tmp_path / "in",
            Recipe(factory="drawn:Drawn"),
            SIGNATURE,
            checkpoint=None,
            folder=project,
        )


def test_a_factory_that_exits_is_an_error(tmp_path: Path, project: Path) -> None:
    (project / "leaves.py").write_text("import sys\ndef f():\n    sys.exit(0)\n")
    with pytest.raises(ArtifactInvalid, match="SystemExit: 0"):
        import_checkpoint(
            tmp_path / "in", Recipe(factory="leaves:f"), SIGNATURE, checkpoint=None, folder=project
        )


def _net(shift: float = 0.0) -> nn.Sequential:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Linear(3, 3))
    return net.apply(lambda part: [p.data.add_(shift) for p in part.parameters(recurse=False)])


SGD = torch.optim.SGD(_net().parameters(), momentum=0.9)
sum(p.sum() for p in SGD.param_groups[0]["params"]).backward()
SGD.step()


@pytest.mark.parametrize(
    "averaged",
    [
        {"ema_state_dict": _net(1.0).state_dict()},
        {"state_dict_ema": {f"module.{k}": v for k, v in _net(1.0).state_dict().items()}},
        {"ema": {"shadow": [*_net(1.0).state_dict().values()], "decay": 0.9}},
    ],
    ids=["by name", "with a prefix", "a list"],
)
@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_two_sets_of_the_same_weights_are_refused(tmp_path, averaged, key) -> None:
    file = tmp_path / "two.pt"
    torch.save({key: _net().state_dict(), **averaged, "optimizer": SGD.state_dict()}, file)
    with pytest.raises(
        ArtifactInvalid, match=f"'{key}' and '{next(iter(averaged))}'; save the one"
    ):
        read_state_dict(file)


def test_two_sets_without_a_usual_name_are_refused(tmp_path) -> None:
    parts = {"generator": {"a.b": torch.ones(2)}, "critic": {"c": torch.ones(3)}}
    torch.save(parts, tmp_path / "x")
    with pytest.raises(ArtifactInvalid, match="'generator' and 'critic'"):
        read_state_dict(tmp_path / "x")


def test_weights_in_a_list_are_sets_too(tmp_path) -> None:
    torch.save({"nets": {"all": [_net().state_dict(), _net().state_dict()]}}, tmp_path / "x")
    with pytest.raises(ArtifactInvalid, match=r"weights, 0 and 1; .*\['nets'\]\['all'\]\[0\]"):
        read_state_dict(tmp_path / "x")


def test_the_advice_names_the_whole_path_to_a_set(tmp_path) -> None:
    two = {"state_dict": _net().state_dict(), "callbacks": {"ema": {"net": _net().state_dict()}}}
    torch.save({"model": two}, tmp_path / "x")
    with pytest.raises(ArtifactInvalid, match=r"\['model'\]\['state_dict'\], …"):
        read_state_dict(tmp_path / "x")


def test_other_weights_beside_are_named(tmp_path, caplog) -> None:
    critic = {"critic": {"c": torch.ones(3)}, "optimizer": SGD.state_dict(), "epoch": 3}
    torch.save({"model": _net().state_dict(), **critic}, tmp_path / "x")
    assert read_state_dict(tmp_path / "x").keys() == _net().state_dict().keys()
    assert "read from 'model'; left out: 'critic' (1 tensors)" in caplog.text


def test_one_set_is_read_whatever_its_name(tmp_path) -> None:
    state = _net().state_dict()
    beside = {"rng": torch.ones(9), "optimizer": SGD.state_dict()}
    torch.save({"ema_state_dict": state, **beside}, tmp_path / "x")
    assert read_state_dict(tmp_path / "x").keys() == state.keys()


def test_torchs_own_loading_decides_what_fits() -> None:
    class Renamed(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *arguments):
            state[prefix + "weight"] = state.pop(prefix + "kernel").T
            super()._load_from_state_dict(state, prefix, *arguments)

    net = nn.Sequential(nn.BatchNorm1d(3), Renamed(3, 2))
    state = net.state_dict() | {"0.running_mean": torch.ones(3), "1.kernel": torch.ones(3, 2)}
    del state["0.num_batches_tracked"], state["1.weight"]
    load_state_(net, dict(state), "x")
    assert torch.equal(net[1].weight, torch.ones(2, 3))
    assert torch.equal(net[0].running_mean, torch.ones(3))
    for change in ({"more": torch.ones(1)}, {"0.weight": torch.ones(4)}):
        with pytest.raises(ArtifactInvalid, match="x does not hold the weights"):
            load_state_(net, {**state, **change}, "x")
    with pytest.raises(ArtifactInvalid, match=r"missing 0\.weight"):
        load_state_(net, {k: v for k, v in state.items() if k != "0.weight"}, "x")


def test_imaginary_parts_are_kept_or_refused(tmp_path) -> None:
    net = nn.ParameterDict({"w": torch.zeros(2, dtype=torch.complex64)})
    state = {"w": torch.tensor([1 + 2j, 3j])}
    write_safetensors(tmp_path / "x.safetensors", state)
    load_state_(net, read_state_dict(tmp_path / "x.safetensors"), "x")
    assert torch.equal(net["w"], state["w"])
    real = nn.ParameterDict({"w": torch.zeros(2)})
    with pytest.raises(ArtifactInvalid, match="complex numbers for the real w"):
        load_state_(real, state, "x")


def test_a_missing_buffer_has_a_way_out_and_a_missing_weight_has_none() -> None:
    class Filters(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("window", torch.hann_window(4))

    state = {**Filters().state_dict()}
    window = state.pop("window")
    with pytest.raises(ArtifactInvalid, match=r"missing buffers window; .*strict=False\), torch"):
        load_state_(Filters(), state, "x")
    net = Filters()
    net.load_state_dict(state, strict=False)
    load_state_(Filters(), net.state_dict(), "x")
    with pytest.raises(ArtifactInvalid, match=r"unexpected more; .*strict=False\), torch"):
        load_state_(Filters(), {**state, "window": window, "more": window}, "x")
    del state["bias"]
    with pytest.raises(ArtifactInvalid, match=r"missing buffers window; missing bias$"):
        load_state_(Filters(), state, "x")
