import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import KeepIndices, Recipe
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.forward import flatten_outputs, run_in_eval
from compress.common.signature import Signature, TensorSpec

ANSWER = """
import torch
from compress import EagerModel
with EagerModel.from_directory({path!r}).open() as predict:
    print(predict(torch.linspace(-1, 1, 8).view(2, 4))[0].flatten().tolist())
"""


def _answer(model: EagerModel) -> list[float]:
    with model.open() as predict:
        return predict(torch.linspace(-1, 1, 8).view(2, 4))[0].flatten().tolist()


def test_loads_bit_identical_in_a_fresh_process_without_the_users_folder(
    mlp: EagerModel, project: Path, fresh_torch: Callable[[str], str]
) -> None:
    expected = _answer(mlp)
    shutil.rmtree(project)
    assert eval(fresh_torch(ANSWER.format(path=str(mlp.path)))) == expected


def test_an_edit_is_replayed_in_a_fresh_process(
    mlp: EagerModel, tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    kept = (0, 3, 5)
    edit = KeepIndices(kept={"0.weight": {0: kept}, "0.bias": {0: kept}, "2.weight": {1: kept}})
    module = mlp.load()
    edit.apply_(module)
    slim = mlp.derive(tmp_path / "slim", module, edits=[edit])
    assert slim.parameters() == 3 * 4 + 3 + 3 * 3 + 3
    assert module[0].out_features == module[2].in_features == 3
    assert eval(fresh_torch(ANSWER.format(path=str(slim.path)))) == _answer(slim)


def test_the_users_later_changes_do_not_reach_a_sealed_model(
    mlp: EagerModel, project: Path
) -> None:
    expected = _answer(mlp)
    (project / "nets.py").write_text("def mlp():\n    raise RuntimeError('changed')\n")
    assert _answer(mlp) == expected


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path, project: Path) -> None:
    (project / "tied.py").write_text(
        "from torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = nn.Linear(4, 4, bias=False)\n"
        "        self.b = nn.Linear(4, 4, bias=False)\n"
        "        self.b.weight = self.a.weight\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x).relu())\n"
    )
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    model = import_checkpoint(
        tmp_path / "tied", Recipe(factory="tied:Tied"), signature, checkpoint=None, folder=project
    )
    module = model.load()
    assert module.a.weight is module.b.weight
    assert model.parameters() == 16
    assert model.payload_bytes < 16 * 4 + 300


def test_from_module_proves_that_the_factory_rebuilds_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(project)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x = (torch.zeros(1, 4),)
    model = EagerModel.from_module(
        module, example_inputs=x, factory="nets:mlp", arguments={"hidden": 8}
    )
    with model.open() as predict:
        assert torch.equal(predict(torch.ones(5, 4))[0], module(torch.ones(5, 4)))
    with pytest.raises(ArtifactInvalid, match=r"shape of 0\.weight: \(8, 4\) instead of \(16, 4\)"):
        EagerModel.from_module(module, example_inputs=x, factory="nets:mlp")
    other = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    with pytest.raises(ArtifactInvalid, match="other outputs"):
        EagerModel.from_module(other, example_inputs=x, factory="nets:mlp", arguments={"hidden": 8})


def test_outputs_are_flattened_in_order() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    assert flatten_outputs({"a": a, "rest": (b, [c])}) == (a, b, c)
    with pytest.raises(ArtifactInvalid, match="returned str"):
        flatten_outputs("no")


def test_more_outputs_than_names_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "two.py").write_text(
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x, x + 1\n"
    )
    inputs = {"inputs": [{"name": "x", "shape": ["batch", 4]}]}
    named = Signature.model_validate({**inputs, "outputs": [{"name": "only"}]})
    arguments = {"checkpoint": None, "folder": project}
    with pytest.raises(PipelineInvalid, match=r"the model returns \["):
        import_checkpoint(tmp_path / "a", Recipe(factory="two:Two"), named, **arguments)
    free = Signature.model_validate(inputs)
    model = import_checkpoint(tmp_path / "b", Recipe(factory="two:Two"), free, **arguments)
    assert [o.name for o in model.signature.outputs] == ["output_0", "output_1"]


def test_running_a_module_leaves_every_part_in_its_mode() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    module[1].eval()
    run_in_eval(module, (torch.ones(2, 4),))
    assert [part.training for part in module.modules()] == [True, True, False]
