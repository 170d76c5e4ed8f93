from pathlib import Path

import pytest
import torch

import export  # noqa: F401 - adds onnxruntime
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import Requirement
from compress.core.context import Context
from compress.core.gate_kinds.baselines import BASELINES, baseline_for
from compress.core.gates import MinSpeedup
from compress.core.stage import Stage


class Trace(Stage[EagerModel, GraphModel]):
    """Write the graph, as quantization does."""

    stage: str = "trace"

    def run(self, model: EagerModel, context: Context) -> GraphModel:
        program, lineage = program_of(model), self.lineage(model)
        return GraphModel.create(context.root, program, model.signature, lineage=lineage)


@pytest.fixture
def graph(mlp: EagerModel, tmp_path: Path) -> GraphModel:
    return Trace()(mlp, Context(root=tmp_path / "graph"))


@pytest.fixture
def context(mlp: EagerModel, tmp_path: Path) -> Context:
    return Context(root=tmp_path / "result", artifacts={"source": mlp})


def speedup(name: str) -> MinSpeedup:
    return MinSpeedup(ratio=1e-6, against=name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    ["eager", *(pytest.param(n, marks=pytest.mark.slow) for n in ("compiled", "onnxruntime"))],
)
def test_the_float_model_runs_in_each_runtime(name: str, mlp, graph, context) -> None:
    torch._dynamo.utils.counters.clear()
    opponent = baseline_for(speedup(name), graph, context)
    inputs = mlp.signature.example(batch=3)
    with opponent.open() as found, mlp.open() as expected:
        torch.testing.assert_close(found(*inputs), expected(*inputs))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(compiled) == (name == "compiled")
    assert opponent.digest not in (mlp.digest, graph.digest)
    assert speedup(name).evaluate(opponent, graph, context).passed


def test_a_stage_takes_precedence_over_a_runtime_of_its_name(graph, mlp, context) -> None:
    known = Context(root=context.root, artifacts={"eager": graph})
    assert baseline_for(speedup("eager"), mlp, known) is graph


def test_an_unknown_float_model_is_an_error(graph, tmp_path) -> None:
    with pytest.raises(StageFailed, match="float model that it was made of is not known"):
        baseline_for(speedup("eager"), graph, Context(root=tmp_path / "result"))


def test_a_missing_compiler_is_named_in_the_error(mlp, graph, context, monkeypatch) -> None:
    none = Requirement(what="no-such-compiler", install="install one", program=True)
    monkeypatch.setitem(BASELINES, "compiled", BASELINES["compiled"]._replace(requirements=(none,)))
    gate = speedup("compiled")
    with pytest.raises(Unavailable, match="against compiled: needs no-such-compiler"):
        gate.evaluate(baseline_for(gate, graph, context), graph, context)
