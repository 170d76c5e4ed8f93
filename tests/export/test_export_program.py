import subprocess
import sys
from pathlib import Path

import pytest
import torch

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.recipe import Recipe
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import Parity
from compress.graph.torch_export import export_program
from export.exported_program import ExportProgram
from export.torchscript.stage import ExportTorchScript

HERE = Path(__file__).parent
ROWS = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
IMAGE = Signature(inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),))


def source(path: Path, factory: str, signature: Signature) -> EagerModel:
    torch.manual_seed(0)
    recipe = Recipe(factory=f"branching_nets:{factory}")
    state = recipe.build(HERE).state_dict()
    return EagerModel.create(path, recipe, state, signature, folder=HERE)


@pytest.mark.slow
def test_torch_alone_answers_alike_and_the_other_exporters_read_it(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "convolutions", IMAGE)
    stage = ExportProgram(gates=(Parity(atol=1e-6),))
    graph = stage(model, Context(root=tmp_path / "program"))
    assert (graph.parameters(), graph.macs()) == (model.parameters(), model.macs())
    assert [step.stage for step in graph.manifest.lineage][-1] == "export_program"
    assert stage(model, Context(root=tmp_path / "again")).digest == graph.digest
    x = torch.randn(7, 1, 8, 8)
    torch.save([x, model.load()(x).detach()], tmp_path / "expected.pt")
    code = (
        "import sys, torch; x, y = torch.load('expected.pt', weights_only=True)\n"
        "got = torch.export.load('program/model.pt2').module()(x)\n"
        "assert torch.allclose(got, y, atol=1e-6)\n"
        "assert not {'branching_nets', 'compress'} & sys.modules.keys()"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    scripted = ExportTorchScript(gates=(Parity(atol=1e-5),))
    scripted(GraphModel.from_directory(graph.path), Context(root=tmp_path / "ts"))


def test_a_graph_from_an_earlier_run_is_compared_again(tmp_path: Path) -> None:
    model = source(tmp_path / "source", "convolutions", IMAGE)
    state = {name: 2 * w for name, w in model.load().state_dict().items()}
    other = model.derive(tmp_path / "other", state)
    context = Context(root=tmp_path / "program")
    graph = ExportProgram()(model, context)
    ExportProgram().check_parity(model, graph, context)
    with pytest.raises(StageFailed, match="answers differ"):
        ExportProgram().check_parity(other, graph, context)


def test_what_cannot_be_traced_is_told_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = source(tmp_path / "source", "guessing", ROWS)
    with pytest.raises(StageFailed, match="data-dependent expression") as caught:
        ExportProgram()(model, Context(root=tmp_path / "program"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "program").exists()


def test_what_a_model_prints_is_not_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = source(tmp_path / "source", "talking", ROWS)
    export_program(model.load(), ROWS)
    assert "forward was called" in capfd.readouterr().err
