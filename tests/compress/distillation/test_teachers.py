"""Teachers from other factories, ONNX files and stages of every kind, and what the store keys."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, PipelineInvalid, StageFailed
from compress.distillation.stage import Distill
from compress.distillation.teacher import OnnxFile, Teacher
from compress.export.onnx.stage import ExportOnnx
from compress.export.torchscript.stage import ExportTorchScript
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from tests.compress.padded_encoder import Padded

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PIPELINE = """
version: 1
code: code
model: {factory: "pupils:net", inputs: [{name: features, shape: [batch, 4]}]}
data: {factory: "pupils:data"}
stages:
  - stage: distill
    teacher: {factory: "pupils:net", arguments: {width: 16, depth: 4}, checkpoint: big.safetensors}
    student: {factory: "pupils:net", arguments: {width: 4}}
    epochs: 2
"""


@pytest.fixture
def folder(tmp_path, school):
    """A user's folder with a pipeline, its code beside it, and a teacher's checkpoint."""
    (tmp_path / "mine" / "code").mkdir(parents=True)
    shutil.copy(HERE / "pupils.py", tmp_path / "mine" / "code")
    save_file(school.weights(school.teacher), tmp_path / "mine" / "big.safetensors")
    (tmp_path / "mine" / "pipeline.yaml").write_text(PIPELINE)
    return tmp_path / "mine"


def test_a_teacher_answers_at_padded_places_as_a_student_in_training():
    module = Padded()
    inputs = torch.randn(4, 6, 8), torch.arange(6).expand(4, 6) > 3
    model = EagerModel.from_module(module, example_inputs=inputs)
    (answers,) = Teacher.from_model(model).load("cpu")(inputs)
    torch.testing.assert_close(answers, module.train()(*inputs).detach())


@pytest.mark.soak
def test_a_pipeline_takes_a_teacher_and_a_student_of_their_own(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"

    def run():
        report = Pipeline.from_yaml("mine/pipeline.yaml").run(out)
        return report.stages[0]

    first = run()
    assert not first.cached and run().cached
    assert first.measurements.parameters == 193
    lineage = (out / "artifacts" / "distill" / "manifest.json").read_text()
    assert str(tmp_path) not in lineage
    (step,) = json.loads(lineage)["lineage"]
    assert set(step["settings"]["teacher"]) == {"factory", "arguments", "code", "checkpoint"}
    weights = folder / "big.safetensors"
    # The same content elsewhere is the same teacher; other content in the same place is another.
    weights.rename(folder / "other.safetensors")
    file = folder / "pipeline.yaml"
    file.write_text(file.read_text().replace("big.safe", "other.safe"))
    assert run().cached
    from safetensors.torch import load_file

    changed = {name: w + 0.01 for name, w in load_file(folder / "other.safetensors").items()}
    save_file(changed, folder / "other.safetensors")
    second = run()
    assert not second.cached
    assert "settings.teacher.checkpoint" in second.reason
    code = folder / "code" / "pupils.py"
    code.write_text(code.read_text() + "\nMORE = 1\n")
    assert not run().cached


def test_a_missing_file_is_refused_before_anything_runs(folder):
    (folder / "big.safetensors").unlink()
    with pytest.raises(ArtifactInvalid, match=r"pipeline.yaml:7.*: checkpoint .*/mine/big.safe"):
        build_plan(Pipeline.from_yaml(folder / "pipeline.yaml"))
    text = PIPELINE.replace("checkpoint: big.safetensors", "checkpont: x")
    (folder / "pipeline.yaml").write_text(text)
    with pytest.raises(PipelineInvalid, match="checkpont"):
        Pipeline.from_yaml(folder / "pipeline.yaml")


def test_a_wrong_checkpoint_is_reported_in_one_line(school, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    save_file({"other": torch.zeros(2)}, tmp_path / "wrong.safetensors")
    teacher = {"factory": "pupils:net", "checkpoint": str(tmp_path / "wrong.safetensors")}
    with pytest.raises(ArtifactInvalid, match=r"^distill: checkpoint .*wrong.*unexpected other"):
        school.distil(school.make(), teacher=teacher)


def test_it_teaches_as_the_same_model_of_a_stage_does(school, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    save_file(school.weights(school.teacher), tmp_path / "big.safetensors")
    teacher = {
        "factory": "pupils:net",
        "arguments": {"width": 16, "depth": 4},
        "checkpoint": str(tmp_path / "big.safetensors"),
    }
    student, settings = school.make(), {"keep": "last"}
    expected = school.distil(student, **settings)
    assert school.same(school.distil(student, **settings, teacher=teacher), expected)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_exported_models_teach(school, tmp_path, cache):
    onnx = ExportOnnx()(school.teacher, school.context())
    script = ExportTorchScript()(school.teacher, school.context())
    graph = GraphModel.from_eager(school.teacher, tmp_path / "graph")
    losses = [{"loss": "kl"}, {"loss": "cosine"}]
    settings = {"keep": "last", "cache_teacher": cache, "losses": losses}
    student = school.make()
    expected = school.weights(school.distil(student, **settings))
    shutil.copy(onnx.payload_path, tmp_path / "big.onnx")
    for teacher in ("onnx", "script", "graph", {"onnx": str(tmp_path / "big.onnx")}):
        context = school.context(onnx=onnx, script=script, graph=graph)
        learnt = school.distil(student, context, **settings, teacher=teacher)
        found = school.weights(learnt)
        assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)
    assert learnt.manifest.lineage[-1].inputs["teacher"] == onnx.manifest.files["model.onnx"].sha256


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("forked_ranks")
def test_an_exported_model_teaches_two_processes(school):
    onnx = ExportOnnx()(school.teacher, school.context())
    parallel = {"processes": 2}
    learnt = school.distil(
        school.make(),
        school.context(onnx=onnx),
        teacher="onnx",
        parallel=parallel,
        cache_teacher=False,
    )
    losses = [e["loss"] for e in learnt.manifest.facts["history"][1:]]
    assert losses[1] < losses[0]


def test_wrong_onnx_files_are_reported_in_one_line(school, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no")
    with pytest.raises(ArtifactInvalid, match=r"^distill: teacher .*broken.onnx: onnxruntime cann"):
        school.distil(school.make(), teacher={"onnx": str(tmp_path / "broken.onnx")})
    other = ExportOnnx()(school.make(classes=7), school.context())
    with pytest.raises(StageFailed, match=r"teacher's output has shape \(16, 7\) and the model's"):
        school.distil(school.make(), teacher={"onnx": str(other.payload_path)})
    with pytest.raises(ArtifactInvalid, match=r"onnx: /.*/none.onnx: no such file"):
        OnnxFile(onnx="none.onnx").resolve_paths(tmp_path, tmp_path)
    answer = Teacher.from_model(OnnxFile(onnx=str(other.payload_path))).load("cpu")
    with pytest.raises(StageFailed, match=r"takes 1 inputs \(features\), and samples have 2"):
        answer((torch.zeros(1, 4), torch.zeros(1, 4)))
    with pytest.raises(StageFailed, match=r"teacher /.*"):
        answer((torch.zeros(1, 5),))


def test_hints_need_an_eager_teacher_which_the_plan_knows(folder, tmp_path):
    text = PIPELINE[: PIPELINE.index("  - stage")] + (
        "  - {stage: export_onnx}\n"
        "  - {stage: distill, input: source, teacher: export_onnx, epochs: 1, losses: LOSSES}\n"
    )
    file = folder / "pipeline.yaml"
    file.write_text(text.replace("LOSSES", "[{loss: kl}]"))
    assert build_plan(Pipeline.from_yaml(file)).stages[1].reads == ("source", "export_onnx")
    file.write_text(text.replace("LOSSES", "[{loss: hint, student: head}]"))
    with pytest.raises(PipelineInvalid, match=r"'export_onnx' writes onnx, and .* must be eager"):
        build_plan(Pipeline.from_yaml(file))


def test_settings_are_read_without_torch():
    code = (
        "import sys; from compress.distillation.stage import Distill\n"
        "Distill(teacher={'onnx': 'a'}, epochs=1, losses=[{'loss': 'similarity'}])\n"
        "print([m for m in ('torch', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert Distill(teacher="a", epochs=1).own_settings()["teacher"] == "a"
