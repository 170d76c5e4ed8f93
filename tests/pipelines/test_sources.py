"""Where a model may come from, as a pipeline file says it, and what is inferred about it."""

import json
import warnings
import zipfile
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from compress.artifacts.artifact import Artifact
from compress.common.errors import (
    ArtifactInvalid,
    CompressError,
    PipelineInvalid,
    Unavailable,
)
from compress.common.requirements import Requirement
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.inputs import (
    check_model,
    resolve_inputs,
    source_parts,
)
from compress.pipelines.runner.source_model import import_source

NETS = """
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.b = nn.Embedding(9, 3)

    def forward(self, x, scale=None, ids=None):
        scores = self.a(x) + self.b(ids).mean(1)
        return {"scores": scores, "sums": scores.sum(1)}

class Texts(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        ids = torch.arange(2 + i % 5)
        return {"ids": ids, "x": torch.full((4,), float(i)), "labels": torch.tensor(i % 3)}

def data():
    return {"train": Texts(), "val": Texts()}

def pairs():
    return {"val": [(torch.full((4,), float(i)), torch.tensor(i % 3)) for i in range(20)]}
"""


class Kept(nn.Module):
    """Not the same in training, so that a file saved in that mode is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor):
        return {"scores": self.drop(self.linear(x)), "sums": x.sum(1)}


class Planted:
    """A pickle that would leave a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def pipeline(folder: Path, model: str, stages: str = "{stage: export_onnx}", data: str = ""):
    (folder / "nets.py").write_text(NETS)
    file = folder / "p.yaml"
    data = f"data: {{factory: 'nets:{data}'}}\n" if data else ""
    file.write_text(f"version: 1\nmodel: {{{model}}}\n{data}stages: [{stages}]\n")
    return Pipeline.from_yaml(file)


def imported(folder: Path, model: str, stage: str = "package_torchserve", data: str = ""):
    """Return the sealed source, and what it answers to one input."""
    read = pipeline(folder, model, f"{{stage: {stage}}}", data)
    build_plan(read)
    settled, *_ = resolve_inputs(read)
    source = import_source(settled, folder / "sealed")
    return source, [o.name for o in source.signature.outputs]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one model in each form that files have."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    module, x = Kept().eval(), torch.randn(2, 4)
    shapes = {"x": {0: torch.export.Dim("rows")}}
    names = {"input_names": ["x"], "output_names": ["scores", "sums"]}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's exporters warn of each other
        torch.save((x, list(module(x).values())), folder / "answers")
        program = torch.export.export(module, (x,), dynamic_shapes=shapes)
        torch.export.save(program, folder / "net.pt2")
        exported = torch.onnx.export(
            program, dynamo=True, dynamic_shapes=shapes, verbose=False, **names
        )
        exported.save(folder / "net.onnx")
        onnx.save(
            exported.model_proto,
            folder / "apart.onnx",
            save_as_external_data=True,
            location="apart.onnx.data",
            size_threshold=0,
        )
        torch.jit.script(module.train()).save(folder / "net.ts")
    return folder


@pytest.mark.parametrize(
    ("model", "stage", "kind"),
    [
        ("file: net.onnx", "package_torchserve", "onnx"),
        ("file: apart.onnx", "package_torchserve", "onnx"),
        ("file: net.pt2", "export_aot", "graph"),
        ("file: net.ts, inputs: [{name: x, shape: [n, 4]}]", "package_torchserve", "torchscript"),
    ],
)
def test_a_file_answers_as_it_did_and_lives_without_its_folder(
    files, tmp_path, model, stage, kind
) -> None:
    for file in files.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    source, outputs = imported(tmp_path, model, stage)
    for file in files.iterdir():
        (tmp_path / file.name).unlink()
    assert (source.kind, outputs) == (kind, ["scores", "sums"])
    assert source.signature.batch_axis is not None
    assert source.parameters() == 15
    x, expected = torch.load(files / "answers")
    again = Artifact.from_directory(source.path)
    with again.open() as predict:
        for found, wanted in zip(predict(x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        ("file: net.onnx", "package_torchserve"),
        ("file: net.pt2", "export_aot"),
        ("file: net.ts, inputs: [{name: x, shape: [n, 4]}]", "package_torchserve"),
    ],
)
@pytest.mark.parametrize("names", [("sums",), ("sums", "scores")], ids=["one", "turned"])
def test_outputs_of_a_file_are_chosen_and_ordered(files, tmp_path, model, stage, names) -> None:
    for file in files.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    listed = ", ".join(f"{{name: {name}}}" for name in names)
    source, outputs = imported(tmp_path, f"{model}, outputs: [{listed}]", stage)
    assert outputs == [*names]
    x, expected = torch.load(files / "answers")
    wanted = [dict(zip(("scores", "sums"), expected, strict=True))[name] for name in names]
    with source.open() as predict:
        for found, answer in zip(predict(x), wanted, strict=True):
            torch.testing.assert_close(found, answer, rtol=0, atol=1e-6)
    with source.open() as predict:
        assert len(predict(torch.zeros(5, 4))[0]) == 5
    if len(names) == 1 and source.kind == "onnx":
        assert source.parameters() == 0, "what made the scores went"


class WithRate(nn.Module):
    """Takes a number beside its tensor."""

    def forward(self, x: torch.Tensor, rate: int) -> torch.Tensor:
        return x * rate


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torchscript_file_that_takes_a_number_is_refused(tmp_path: Path) -> None:
    torch.jit.script(WithRate()).save(tmp_path / "net.jit")
    inputs = "inputs: [{name: x, shape: [1, 4]}, {name: rate, shape: [1], dtype: int64}]"
    with pytest.raises(ArtifactInvalid, match="takes rate, of type int, and inputs are tensors"):
        imported(tmp_path, f"file: net.jit, {inputs}")


class Keywords(nn.Module):
    """Takes a tensor by position, others by keyword and in a mapping, and constants."""

    def forward(self, x, *, scale=None, double=False, more=None, absent=None):
        y = x * scale + more["shift"] + (1 if double else 0)
        return y[:, :1], y.sum(1)


def test_a_program_with_keywords_is_called_by_position(tmp_path) -> None:
    rows, width = torch.export.Dim("rows"), torch.export.Dim("width", min=4, max=30)
    x, scale, shift = torch.randn(2, 8), torch.rand(2, 1), torch.rand(2, 1)
    keywords = {"scale": scale, "double": True, "more": {"shift": shift}, "absent": None}
    shapes = {"x": {0: rows, 1: width}, "scale": {0: rows}, "double": None, "absent": None}
    shapes |= {"more": {"shift": {0: rows}}}
    program = torch.export.export(Keywords(), (x,), keywords, dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "net.pt2")
    expected = Keywords()(x, **keywords)
    source, outputs = imported(tmp_path, "file: net.pt2", "export_aot")
    signature = source.signature
    assert [i.name for i in signature.inputs] == ["x", "scale", "more_shift"]
    assert outputs == ["output_0", "output_1"]
    assert {k: (b.min, b.max) for k, b in signature.axes.items()} == {"x_1": (4, 30)}
    with source.open() as predict:
        for found, answer in zip(predict(x, scale, shift), expected, strict=True):
            torch.testing.assert_close(found, answer)
    inputs = "{name: more_shift, shape: [n, 1]}, {name: scale, shape: [n, 1]}, "
    inputs += "{name: x, shape: [n, width]}"
    model = f"file: net.pt2, inputs: [{inputs}], outputs: [{{name: output_1}}]"
    (tmp_path / "again").mkdir()
    (tmp_path / "net.pt2").rename(tmp_path / "again" / "net.pt2")
    source, outputs = imported(tmp_path / "again", model, "export_aot")
    assert outputs == ["output_1"]
    assert {k: (b.min, b.max) for k, b in source.signature.axes.items()} == {"width": (4, 30)}
    with source.open() as predict:
        torch.testing.assert_close(predict(shift, scale, x)[0], expected[1])


def test_a_program_is_quantized_once(tmp_path) -> None:
    weights = "{stage: quantize_weights}"
    plan = build_plan(pipeline(tmp_path, "file: net.pt2", f"{weights}, {{stage: export_onnx}}"))
    assert plan.route == "quantize_weights → export_onnx"
    twice = f"{weights}, {{stage: quantize_dynamic}}"
    found = r"\(quantize_dynamic\): 'quantize_weights' is quantized already, .* `input:` \(source\)"
    with pytest.raises(PipelineInvalid, match=found):
        build_plan(pipeline(tmp_path, "file: net.pt2", twice))


def test_a_files_inputs_come_from_the_file_or_the_data(files, tmp_path) -> None:
    inferred = resolve_inputs(pipeline(tmp_path, f"file: {files / 'net.onnx'}"))[2]
    assert inferred == "model.inputs, from net.onnx: x [rows, 4] float32"
    _, data, inferred = resolve_inputs(
        pipeline(tmp_path, f"file: {files / 'net.ts'}", data="pairs")
    )
    assert inferred == "model.inputs, from the samples of the data: x [batch, 4] float32"
    assert data is not None
    with pytest.raises(PipelineInvalid, match=r"p\.yaml:2: model: inputs are not declared"):
        resolve_inputs(pipeline(tmp_path, f"file: {files / 'net.ts'}"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("file: pickled.ts, inputs: [{name: x, shape: [n, 4]}]", "model.file: .*not TorchScript"),
        ("file: pickled.pt2", "holds 'pickled/data.pkl'|not a torch.export program"),
        ("file: text.onnx", "text.onnx: not an ONNX file"),
        ("file: missing.onnx", "missing.onnx: no such file"),
        ("file: net.onnx, inputs: [{name: y, shape: [n, 4]}]", r"has \['x'\], found \['y'\]"),
        ("file: net.onnx, inputs: [{name: x, shape: [n, 5]}]", r"not take x \[n, 5\] float32"),
        ("file: net.pt2, outputs: [{name: sums}, {name: sum}]", r"returns \['scores', 'sums'\]"),
        ("file: net.onnx, outputs: [{name: sum}]", r"net\.onnx gives \['scores', 'sums'\]"),
        ("file: alone.onnx", "alone.onnx: .*apart.onnx.data"),
    ],
)
def test_a_file_that_cannot_be_taken_is_one_line(files, tmp_path, model, message) -> None:
    for name in ("net.onnx", "net.pt2"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    (tmp_path / "alone.onnx").write_bytes((files / "apart.onnx").read_bytes())
    torch.save(Planted(tmp_path / "ran"), tmp_path / "pickled.ts")
    torch.save(Planted(tmp_path / "ran"), tmp_path / "pickled.pt2")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(CompressError, match=message) as caught:
        imported(tmp_path, model, "export_onnx" if ".pt2" in model else "package_torchserve")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_pickles_within_a_program_are_left_where_they_are(files, tmp_path) -> None:
    torch.save(Planted(tmp_path / "ran"), tmp_path / "planted")
    with (
        zipfile.ZipFile(files / "net.pt2") as old,
        zipfile.ZipFile(tmp_path / "net.pt2", "w") as new,
    ):
        for entry in old.infolist():
            planted = entry.filename.endswith("sample_inputs/model.pt")
            content = (tmp_path / "planted").read_bytes() if planted else old.read(entry)
            new.writestr(entry, content)
    source, _ = imported(tmp_path, "file: net.pt2", "export_onnx")
    with source.open() as predict:
        predict(torch.zeros(2, 4))
    assert not (tmp_path / "ran").exists()


def test_weights_beside_an_onnx_file_decide_its_key(files, tmp_path) -> None:
    for name in ("apart.onnx", "apart.onnx.data"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    read = pipeline(tmp_path, "file: apart.onnx", "{stage: package_torchserve}")
    before = source_parts(read)
    with (tmp_path / "apart.onnx.data").open("r+b") as data:
        data.write(b"\1\2\3\4")
    assert source_parts(read) != before


def test_stages_that_do_not_read_a_files_kind_are_refused(files, tmp_path) -> None:
    read = pipeline(tmp_path, f"file: {files / 'net.ts'}", "{stage: export_onnx}", data="pairs")
    with pytest.raises(PipelineInvalid, match=r"begin with another .* package_torchserve"):
        build_plan(read)


def test_inputs_are_inferred_announced_and_used_by_every_stage(tmp_path) -> None:
    stages = "{stage: train, epochs: 1}, {stage: export_onnx}"
    read, said = pipeline(tmp_path, "factory: 'nets:Net'", stages, data="data"), []
    report = read.run(tmp_path / "out", announce=said.append)
    inferred = "ids [batch, length] int64, x [batch, 4] float32"
    assert said[0] == f"model.inputs, from the samples of the data: {inferred}"
    inputs = report.lock["settings"]["model"]["inputs"]
    assert [spec["name"] for spec in inputs] == ["ids", "x"]
    graph = onnx.load(tmp_path / "out/artifacts/export_onnx/model.onnx").graph
    assert [i.name for i in graph.input] == ["ids", "x"]
    assert [o.name for o in graph.output] == ["scores", "sums"]
    said.clear()
    again = read.run(tmp_path / "out", announce=said.append)
    assert all(row.cached for row in again.stages)


def test_check_shows_what_was_inferred(tmp_path, capfd) -> None:
    from compress import cli

    pipeline(tmp_path, "factory: 'nets:Net'", data="data")
    spoken = {"quiet": False, "debug": False}
    cli.check(tmp_path / "p.yaml", as_json=False, **spoken)
    inferred = "ids [batch, length] int64, x [batch, 4] float32\n"
    assert inferred in capfd.readouterr().out
    cli.check(tmp_path / "p.yaml", as_json=True, **spoken)
    found = json.loads(capfd.readouterr().out)["signature"]
    assert [o["name"] for o in found["outputs"]] == ["scores", "sums"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("hugingface: bert", r"model\.hugingface: unknown key; did you mean 'huggingface'"),
        ("huggingface: bert, task: sums", r"model\.task: .*'text-classification'.*found 'sums'"),
        ("huggingface: bert, labels: [good, good]", r"model\.labels: label 'good' is given twice"),
        ("timm: 'hf-hub:x/y'", "names a place to download from"),
        ("timm: resnet18, arguments: {pretrained: true}", "pretrained is not taken here"),
        ("file: model.bin", r"model\.file: .*found 'model\.bin'"),
        ("inputs: [{name: x}]", r"model\.factory: is required"),
    ],
)
def test_a_mistake_is_one_line_of_its_own_form(tmp_path, model, message) -> None:
    with pytest.raises(PipelineInvalid, match=message) as caught:
        pipeline(tmp_path, model)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_library_is_refused_early(tmp_path) -> None:
    read = pipeline(tmp_path, "timm: resnet18, inputs: [{name: x, shape: [b, 3, 32, 32]}]")
    missing = [r for r in read.model.requirements if r.missing()]
    if not missing:
        pytest.skip("timm and torchvision are installed")
    assert isinstance(missing[0], Requirement)
    with pytest.raises(Unavailable, match=r"p\.yaml:2: model: needs timm.*--no-deps"):
        build_plan(read)


@pytest.mark.soak
@pytest.mark.slow  # importing transformers is what takes long
def test_a_hugging_face_folder_goes_the_whole_road(tmp_path, fresh_torch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(intermediate_size=24, vocab_size=40, num_labels=3, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    names = ", ".join(
        f"{{name: {n}, shape: [batch, 6], dtype: int64}}" for n in ("attention_mask", "input_ids")
    )
    stages = "{stage: prune_channels, ratio: 0.5}, {stage: quantize_dynamic}, {stage: export_onnx}"
    model = f"huggingface: bert, task: text-classification, inputs: [{names}]"
    read = pipeline(tmp_path, model, stages)
    assert [o.name for o in check_model(read)[0].outputs] == ["logits"]
    report = read.run(tmp_path / "out")
    assert report.status == "passed"
    assert report.stages[0].measurements.parameters < report.baseline.parameters
    graph = onnx.load(tmp_path / "out/artifacts/export_onnx/model.onnx").graph
    assert [i.name for i in graph.input] == ["attention_mask", "input_ids"]
    slim = Artifact.from_directory(tmp_path / "out/artifacts/prune_channels")
    ids = torch.arange(12).reshape(2, 6)
    with slim.open() as predict:
        expected = predict((ids % 4 != 0).long(), ids)[0]
    answered = fresh_torch(
        "import torch\nfrom compress import EagerModel\n"
        "ids = torch.arange(12).reshape(2, 6)\n"
        f"with EagerModel.from_directory({str(slim.path)!r}).open() as predict:\n"
        "    print(predict((ids % 4 != 0).long(), ids)[0].tolist())"
    )
    assert answered == str(expected.tolist())
