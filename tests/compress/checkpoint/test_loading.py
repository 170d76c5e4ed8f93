import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint.loading import read_state_dict
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
