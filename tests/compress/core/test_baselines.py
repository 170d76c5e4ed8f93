import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress import export  # noqa: F401 - adds onnxruntime
from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel, program_of
from compress.common.errors import StageFailed, Unavailable
from compress.common.forward import OpenedModel
from compress.common.requirements import Requirement
from compress.core.context import Context
from compress.core.gates import MaxSize, MinSpeedup
from compress.core.gates.runtime import BASELINES, baseline_for, in_runtime_of
from compress.core.stage import Stage, evaluate_gates
from compress.export.onnx.stage import ExportOnnx
from compress.profiling import benchmark
from compress.pruning.prune_channels import PruneChannels


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


def speedup(name: str | None) -> MinSpeedup:
    return MinSpeedup(ratio=1e-6, against=name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.parametrize("name", [pytest.param("compiled", marks=pytest.mark.slow), "onnxruntime"])
def test_the_uncompressed_model_runs_in_another_runtime(name: str, mlp, graph, context) -> None:
    torch._dynamo.utils.counters.clear()
    baseline = baseline_for(speedup(name), graph, graph, context)
    inputs = mlp.signature.example(batch=3)
    with baseline.open() as found, mlp.open() as expected:
        torch.testing.assert_close(found(*inputs), expected(*inputs))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert bool(compiled) == (name == "compiled")
    assert baseline.digest not in (mlp.digest, graph.digest)
    assert speedup(name).evaluate(baseline, graph, context).passed


def test_a_speedup_is_over_the_uncompressed_model_in_the_results_runtime(mlp, tmp_path) -> None:
    wider = Context(root=tmp_path / "wider", artifacts={"source": mlp})
    small = PruneChannels(ratio=0.5, round_to=1).run_checked(mlp, wider)
    context = Context(root=tmp_path / "onnx", artifacts={"source": mlp})
    file = ExportOnnx(gates=(speedup(None), MaxSize(ratio=9))).run_checked(small, context)
    baseline = baseline_for(speedup(None), small, file, context)
    inputs = mlp.signature.example(batch=3)
    with baseline.open() as found, mlp.open() as expected, small.open() as pruned:
        torch.testing.assert_close(found(*inputs), expected(*inputs))
        assert not torch.allclose(pruned(*inputs)[0], expected(*inputs)[0])
    assert baseline_for(speedup(None), small, small, context) is mlp, "eager against eager"
    assert baseline_for(speedup("eager"), small, file, context) is mlp
    assert baseline_for(MaxSize(ratio=9), small, file, context) is small, "sizes: the input"
    judged = evaluate_gates((speedup(None), MaxSize(ratio=9)), small, file, context)
    assert [v.against for v in judged] == ["source in ONNX Runtime", "input"]


def test_of_large_models_the_uncompressed_file_is_opened_beside_no_other(
    mlp: EagerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = Context(root=tmp_path / "wider", artifacts={"source": mlp})
    small = PruneChannels(ratio=0.5, round_to=1).run_checked(mlp, wider)
    context = Context(root=tmp_path / "onnx", artifacts={"source": mlp})
    file = ExportOnnx()(small, context)
    open_anew, opened = Artifact.open_anew, []

    def record(artifact: Artifact, *arguments: object) -> OpenedModel:
        opened.append(artifact.digest)
        return open_anew(artifact, *arguments)

    monkeypatch.setattr(Artifact, "open_anew", record)
    monkeypatch.setattr(EagerModel, "open_anew", record)
    monkeypatch.setattr("compress.core.context.LARGE_BYTES", 0)
    twin = in_runtime_of(file, context)
    assert twin is not None
    context.compare_latencies([mlp, twin], file, 1, 1e-9)
    assert opened[:3] == [twin.digest, mlp.digest, file.digest]
    assert opened == opened[:3] * (len(opened) // 3)


def test_the_uncompressed_model_is_exported_once(mlp, tmp_path, monkeypatch) -> None:
    written = []
    write = ExportOnnx.write

    def counted(stage, model, file, context):
        written.append(model.digest)
        return write(stage, model, file, context)

    monkeypatch.setattr(ExportOnnx, "write", counted)
    context = Context(root=tmp_path / "onnx", artifacts={"source": mlp})
    gates = (MinSpeedup(ratio=1e-6), MinSpeedup(ratio=1e-6, batch=2))
    ExportOnnx(gates=gates, optimize="basic")(mlp, context)
    assert len(written) == 2, "the stage's own, and one for both gates"


def test_a_file_of_the_uncompressed_model_is_its_own_baseline(mlp, context, tmp_path) -> None:
    file = ExportOnnx().run(mlp, context)
    assert baseline_for(speedup(None), mlp, file, context) is file
    small = PruneChannels(ratio=0.5, round_to=1).run(mlp, context.with_root(tmp_path / "small"))
    of_small = ExportOnnx().run(small, context.with_root(tmp_path / "of_small"))
    assert baseline_for(speedup(None), small, of_small, context) is not of_small
    exported = replace(context, artifacts={**context.artifacts, "float": file})
    assert baseline_for(speedup(None), small, of_small, exported) is file


def test_a_model_that_the_runtime_does_not_take_fails_the_gate(mlp, tmp_path, monkeypatch) -> None:
    def refuse(stage, model, file, context):
        raise StageFailed("aten.nonsense is not supported")

    context = Context(root=tmp_path / "onnx", artifacts={"source": mlp})
    file = ExportOnnx(optimize="basic").run_checked(mlp, context)
    monkeypatch.setattr(ExportOnnx, "write", refuse)
    baseline = baseline_for(speedup(None), mlp, file, context)
    verdict = speedup(None).evaluate(baseline, file, context)
    assert not verdict.passed
    assert verdict.reason == "aten.nonsense is not supported"


def test_a_wrong_file_of_the_uncompressed_model_is_refused(
    mlp, blobs, tmp_path, monkeypatch
) -> None:
    context = Context(root=tmp_path / "onnx", artifacts={"source": mlp}, data=blobs)
    file = ExportOnnx(optimize="basic").run_checked(mlp, context)
    small = PruneChannels(ratio=0.5, round_to=1).run(mlp, context.with_root(tmp_path / "small"))
    write, written = ExportOnnx.write, []

    def write_other(stage, model, path, own):
        written.append(model.digest)
        return write(stage, small, path, own)

    monkeypatch.setattr(ExportOnnx, "write", write_other)
    with pytest.raises(StageFailed, match="answers differ"):
        context.compare_latency(baseline_for(speedup(None), mlp, file, context), file, 1)
    assert written == [mlp.digest]


def test_the_uncompressed_model_is_exported_before_anything_is_timed(
    mlp, tmp_path, monkeypatch
) -> None:
    def time(*_: object, **__: object) -> None:
        assert written
        raise Unavailable("here")

    context = Context(root=tmp_path / "onnx", artifacts={"source": mlp})
    file = ExportOnnx(optimize="basic").run_checked(mlp, context)
    write, written = ExportOnnx.write, []
    monkeypatch.setattr(ExportOnnx, "write", lambda *a: (written.append(a), write(*a))[1])
    monkeypatch.setattr(benchmark, "compare_latencies", time)
    with pytest.raises(Unavailable, match="here"):
        context.compare_latency(baseline_for(speedup(None), mlp, file, context), file, 1)


def test_a_stage_takes_precedence_over_a_runtime_of_its_name(graph, mlp, context) -> None:
    known = Context(root=context.root, artifacts={"eager": graph})
    assert baseline_for(speedup("eager"), mlp, mlp, known) is graph


def test_an_unknown_float_model_is_an_error(graph, tmp_path) -> None:
    with pytest.raises(StageFailed, match="float model that it was made of is not known"):
        baseline_for(speedup("eager"), graph, graph, Context(root=tmp_path / "result"))


def test_a_missing_compiler_is_named_in_the_error(mlp, graph, context, monkeypatch) -> None:
    none = Requirement(what="no-such-compiler", install="install one", program=True)
    monkeypatch.setitem(BASELINES, "compiled", BASELINES["compiled"]._replace(requirements=(none,)))
    gate = speedup("compiled")
    with pytest.raises(Unavailable, match="against compiled: needs no-such-compiler"):
        gate.evaluate(baseline_for(gate, graph, graph, context), graph, context)


@pytest.mark.parametrize(
    "found",
    [
        "runtime.runtime_named('onnxruntime').title == 'ONNX Runtime'",
        "runtime.runtime_named('a_stage') is None",
        "'on web' in compress.Parity(atol=1, on='web').measurement_key()",
    ],
)
def test_a_runtime_is_found_where_no_exporter_was_imported(found: str) -> None:
    code = (
        "import compress\nfrom compress.core.gates import runtime\n"
        "assert 'onnxruntime' not in runtime.BASELINES\n"
        f"assert {found}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
