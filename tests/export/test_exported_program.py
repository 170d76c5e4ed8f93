import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed
from compress.core.context import Context
from compress.core.gates import Parity
from compress.export.exported_program import ExportProgram
from compress.export.torchscript.stage import ExportTorchScript
from compress.graph.torch_export import export_program
from tests.export.builders import HERE, ROWS, network


def test_torch_alone_answers_alike_and_the_other_exporters_read_it(
    tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    model = network(tmp_path / "source", "branching_nets:convolutions", folder=HERE)
    stage = ExportProgram(gates=(Parity(atol=1e-6),))
    graph = stage(model, Context(root=tmp_path / "program"))
    assert (graph.parameters(), graph.macs()) == (model.parameters(), model.macs())
    assert [step.stage for step in graph.manifest.lineage][-1] == "export_program"
    assert stage(model, Context(root=tmp_path / "again")).digest == graph.digest
    x = torch.randn(7, 1, 8, 8)
    torch.save([x, model.load()(x).detach()], tmp_path / "expected.pt")
    fresh_torch(
        "import sys, torch; x, y = torch.load('expected.pt', weights_only=True)\n"
        "got = torch.export.load('program/model.pt2').module()(x)\n"
        "assert torch.allclose(got, y, atol=1e-6)\n"
        "assert not {'branching_nets', 'compress'} & sys.modules.keys()"
    )
    scripted = ExportTorchScript(gates=(Parity(atol=1e-5),))
    scripted(GraphModel.from_directory(graph.path), Context(root=tmp_path / "ts"))


def test_a_graph_from_an_earlier_run_is_compared_again(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "branching_nets:convolutions", folder=HERE)
    state = {name: 2 * w for name, w in model.load().state_dict().items()}
    other = model.derive(tmp_path / "other", state)
    context = Context(root=tmp_path / "program")
    graph = ExportProgram()(model, context)
    ExportProgram().check_parity(model, graph, context)
    with pytest.raises(StageFailed, match="answers differ"):
        ExportProgram().check_parity(other, graph, context)


def test_what_cannot_be_traced_is_reported_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if torch, which logs a warning here, was imported while stderr was what it is now.
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler()])
    model = network(tmp_path / "source", "branching_nets:guessing", ROWS, HERE)
    with pytest.raises(StageFailed, match="data-dependent expression") as caught:
        ExportProgram()(model, Context(root=tmp_path / "program"))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "program").exists()


def test_what_a_model_prints_is_not_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = network(tmp_path / "source", "branching_nets:talking", ROWS, HERE)
    export_program(model.load(), ROWS)
    assert "forward was called" in capfd.readouterr().err
