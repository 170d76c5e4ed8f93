"""`compress init`: it writes a valid file for each kind of model, and rejects wrong options."""

import itertools
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from torch import nn

from compress.common.errors import CompressError, PipelineInvalid
from compress.core.objectives.task import TASKS, infer_task
from compress.data.splits import Splits
from compress.pipelines import Pipeline
from compress.pipelines.commands.check import check_pipeline
from compress.pipelines.commands.init import (
    Goal,
    InitOptions,
    Target,
    draft,
    initial_content,
    prompt_for_missing,
    render_and_plan,
    write_draft,
)
from compress.pipelines.commands.model_traits import (
    Family,
    ModelTraits,
    family_of,
    inspect_model,
)

EXAMPLES = Path(__file__).parents[3] / "examples"
NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, steps):
        return self.head(self.lstm(steps)[0][:, -1])

class Sized(nn.Linear):
    def __init__(self, width, classes):
        super().__init__(width, classes)

def recurrent():
    return Recurrent()

def mlp(hidden=8):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))

def blobs(count=60, labelled=True):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    parts = {"train": x[: count // 2], "val": x[count // 2 :]}
    pairs = {name: (x, x[:, :3].argmax(1)) if labelled else (x,) for name, x in parts.items()}
    return {name: TensorDataset(*pair) for name, pair in pairs.items()}

def nothing():
    return 3

def scaled():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    return Scaled(4, 3)
"""
DATA = {
    "none": {},
    "val": {"val": 20},
    "few": {"train": 10, "val": 20},
    "many": {"train": 3000, "val": 20},
    "calibration": {"train": 3, "calibration": 20, "val": 20},
}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "nets.onnx").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


STREAM = """
import torch
from torch import nn

class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.state = nn.LSTM(4, 8, batch_first=True), torch.zeros(1, 1, 8)

    def forward(self, steps):
        out, (self.state, _) = self.lstm(steps, (self.state, torch.zeros(1, 1, 8)))
        return out

def steps():
    return {"train": torch.randn(20, 5, 4), "val": torch.randn(20, 5, 4)}

class Sample(nn.Linear):
    def forward(self, x):
        return torch.mv(self.weight, x) + self.bias

class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Sample(4, 3)

    def forward(self, x):
        return self.model(x.squeeze(0))[None]

def sample():
    return Sample(4, 3)

def vectors():
    return {name: [(torch.randn(4), i % 3) for i in range(20)] for name in ("train", "val")}

class Six(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(6, -1))

def six():
    return nn.Sequential(Six(4, 20), nn.ReLU(), Six(20, 4), Six(4, 3))

class Mean(nn.Linear):
    def forward(self, x):
        return super().forward(x.mean(0, keepdim=True))

def mean():
    return Mean(4, 3)
"""


def test_a_model_that_takes_one_row_is_declared_so(user: Path) -> None:
    (user / "stream.py").write_text(STREAM)
    file, options = user / "p.yaml", InitOptions("stream:Stream", data="stream:steps")
    with pytest.raises(CompressError, match=r"one row is taken: .* as 1 \(steps=1,5,4\)"):
        write_draft(file, options)
    write_draft(file, replace(options, inputs=["steps=1,5,4"]))
    content = yaml.safe_load(file.read_text())
    assert content["model"]["inputs"] == [{"name": "steps", "shape": [1, 5, 4]}]


def test_a_model_without_a_batch_axis_is_told_how_to_get_one(user: Path) -> None:
    (user / "stream.py").write_text(STREAM)
    file, options = user / "p.yaml", InitOptions("stream:sample", data="stream:vectors")
    shown = r"^--data \(--input declares other inputs\): "
    advice = r"returns model\(x.squeeze\(0\)\)\[None\], and declare a batch of 1 \(x=1,4\)"
    with pytest.raises(CompressError, match=rf"{shown}.*does not take x \[2, 4\].*{advice}"):
        write_draft(file, options)
    declared = r"--input: .* x \[batch, 4\] float32, and declared is x \[4\] float32; "
    with pytest.raises(CompressError, match=rf"{declared}.*{advice}"):
        write_draft(file, replace(options, inputs=["x=4"]))
    write_draft(file, replace(options, model="stream:Row", inputs=["x=1,4"]))


def test_a_training_gets_the_only_batch_that_a_model_takes(user: Path) -> None:
    (user / "stream.py").write_text(STREAM)
    file, options = user / "p.yaml", InitOptions("stream:six", data="stream:vectors")
    write_draft(file, replace(options, inputs=["input=6,4"]))
    trained, *_, exported = yaml.safe_load(file.read_text())["stages"]
    assert trained == {"stage": "train", "epochs": 10, "batch_size": 6}
    assert exported["gates"][-1] == {"gate": "min_speedup", "ratio": 1.0, "batch": 6}


def test_a_model_of_one_answer_for_all_samples_is_refused(user: Path) -> None:
    (user / "stream.py").write_text(STREAM)
    file, options = user / "p.yaml", InitOptions("stream:mean", data="stream:vectors")
    expected = r"outputs have the shape \[1, 3\] for 20 samples as for one.*--input NAME=1,4\)"
    with pytest.raises(CompressError, match=expected):
        write_draft(file, options)
    assert not file.exists()
    write_draft(file, replace(options, inputs=["input=1,4"]))
    assert yaml.safe_load(file.read_text())["stages"][0]["batch_size"] == 1


@pytest.mark.parametrize("target", get_args(Target))
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (f != "linear")) for f in get_args(Family)],
)
def test_every_file_that_can_be_written_is_valid(
    user: Path, family: Family, target: Target
) -> None:
    file, seen = user / "pipeline.yaml", set()
    others = itertools.product(get_args(Goal), DATA, (True, False))
    for i, (goal, samples, trained) in enumerate(others):
        options = InitOptions(
            "nets:mlp", ["hidden=4"], "x.pt", ["x=batch,4"], "nets:blobs", target, goal
        )
        options = options if DATA[samples] else replace(options, data=None, checkpoint=None)
        # Every route needs labels with a known loss: two goals have them, and one has all else.
        tasks = [None, *TASKS] if goal == "both" else [n for n in TASKS if TASKS[n].losses]
        labelled = bool(DATA[samples]) and (goal != "both" or i % 5 > 0)
        weight_bytes = (100, 10**7)[i // 2 % 2]
        found = ModelTraits(
            family,
            weight_bytes,
            trained,
            DATA[samples],
            tasks[i % len(tasks)],
            labelled,
            scale=30.0,
        )
        # This reads the text again, and refuses what `compress check` does.
        text, plan = render_and_plan(
            file, initial_content(file, options), options, found, inferred=False
        )
        seen.add(plan.route)
        kernels = {getattr(planned.stage, "target", None) for planned in plan.stages} - {None}
        assert kernels <= {"inductor-cpu" if target == "aot" else "onnxruntime-cpu"}
        assert text.count("\n  - {") == len(plan.stages)
        assert all(len(line) < 250 and line == line.rstrip() for line in text.splitlines())
    # With and without `train`, `prune_channels` and `quantize_static`; and of linear layers for
    # onnxruntime, by `quantize_dynamic` or `quantize_weights`.
    linear = 4 if target == "onnx" else 2
    assert len(seen) == {"convolutional": 8, "linear": linear, "other": 2, "exported": 2}[family]


@pytest.mark.parametrize(
    ("folder", "options", "stages"),
    [
        (
            "custom",
            InitOptions("my_model:classifier", data="my_data:splits"),
            ("train", "quantize_dynamic", "export_onnx"),
        ),
        (
            "digits",
            InitOptions(
                "models:resnet20", inputs=["image=batch,1,8,8"], target="aot", goal="smaller"
            ),
            ("export_aot",),
        ),
        (
            "text",
            InitOptions("reader:reader", data="lines:splits", target="torchscript", goal="smaller"),
            ("train", "quantize_static", "export_torchscript"),
        ),
    ],
)
def test_the_examples_get_stages_that_suit_them(
    tmp_path: Path, folder: str, options: InitOptions, stages: tuple[str, ...]
) -> None:
    for file in (EXAMPLES / folder).glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    found = write_draft(tmp_path / "pipeline.yaml", options)
    assert found.stages == stages
    assert check_pipeline(tmp_path / "pipeline.yaml", models=False).content["valid"]


def test_an_input_with_a_type_and_no_sizes_is_a_scalar(user: Path) -> None:
    options = InitOptions("nets:scaled", inputs=["x=batch,4", "scale=:float64"])
    content = yaml.safe_load(draft(user / "pipeline.yaml", options).text)
    scalar = {"name": "scale", "dtype": "float64"}
    assert content["model"]["inputs"] == [{"name": "x", "shape": ["batch", 4]}, scalar]
    inputs = Pipeline.model_validate({"name": "scaled", **content}).model.inputs or ()
    assert [spec.shape for spec in inputs] == [("batch", 4), ()]


def test_what_is_written_names_the_inputs_the_arguments_and_the_checkpoint(user: Path) -> None:
    (user / "pipelines").mkdir()
    nets = {"hidden": 6}
    torch.save(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).state_dict(), "w.pt")
    file = Path("pipelines/small.yaml")
    options = InitOptions("nets:mlp", ["hidden=6"], Path("w.pt"), data="nets:blobs", goal="smaller")
    found = write_draft(file, options)
    content = yaml.safe_load(file.read_text())
    assert content["code"] == ".."
    assert content["model"] == {
        "factory": "nets:mlp",
        "arguments": nets,
        "checkpoint": "../w.pt",
        "inputs": [{"name": "input", "shape": ["batch", 4]}],
    }
    assert found.stages == ("quantize_weights", "export_onnx")
    assert check_pipeline(file, models=True).content["signature"]["inputs"][0]["shape"] == [
        "batch",
        4,
    ]

    before = file.read_text()
    with pytest.raises(PipelineInvalid, match=r"exists and is not overwritten; .*--force"):
        write_draft(file, replace(options, goal="faster"))
    assert file.read_text() == before
    write_draft(file, replace(options, goal="faster"), force=True)
    assert "quantize_dynamic" in file.read_text()


def test_what_a_layer_counts_for(user: Path) -> None:
    assert draft(
        user / "p.yaml",
        InitOptions("nets:recurrent", inputs=["steps=batch,length,4"]),
    ).stages == (
        "quantize_dynamic",
        "export_onnx",
    )
    assert family_of(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Linear(1, 1))) == "convolutional"
    assert family_of(nn.TransformerEncoderLayer(8, 2)) == "linear"
    assert family_of(nn.ReLU()) == "other"
    steps = [nn.Linear(4, 4) for _ in range(3)]
    for step in steps[1:]:
        step.weight = steps[0].weight
    assert family_of(nn.Sequential(nn.Conv2d(1, 1, 1), *steps)) == "convolutional"


@pytest.mark.parametrize(
    ("samples", "gate", "limits"),
    [(128, "max_disagreement", {"percent", "error"}), (127, "parity", {"atol"})],
)
def test_answers_of_an_unknown_kind_are_compared_as_numbers(
    samples: int, gate: str, limits: set[str]
) -> None:
    data = {"train": [torch.randn(4) for _ in range(20)], "val": [torch.randn(4)] * samples}
    found = inspect_model(nn.Linear(4, 3), Splits(data), trained=True)
    (judged,) = found.quality_gates
    assert (judged.pop("gate"), judged.keys()) == (gate, limits)


@pytest.mark.parametrize("samples", [128, 20])
def test_answers_of_many_numbers_are_compared_whatever_their_scale(samples: int) -> None:
    data = {"train": [torch.randn(4) for _ in range(20)], "val": [torch.randn(4)] * samples}
    for scale in (1.0, 300.0):
        boxes = nn.Sequential(nn.Linear(4, 21 * 20), nn.Unflatten(1, (21, 20)))
        boxes[0].weight.data *= scale
        found = inspect_model(boxes, Splits(data), trained=True)
        assert found.quality_gates == ({"gate": "min_cosine", "minimum": 0.99},)


def test_samples_without_labels_are_judged_by_the_first_models(user: Path) -> None:
    (user / "unlabelled.py").write_text(
        "import nets\ndef data():\n    return nets.blobs(60, False)"
    )
    options = InitOptions("nets:mlp", data="unlabelled:data", task="classification")
    found = draft(user / "p.yaml", options)
    assert yaml.safe_load(found.text)["metric"] == "fidelity"
    assert "train" not in found.stages


SCRIPT = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.body = nn.Linear(4, classes)

    def forward(self, x):
        return self.body(x)

def helper():
    return 3
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one small network in every format that `init` takes."""
    folder, x = tmp_path_factory.mktemp("exported"), torch.zeros(2, 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export and torch.jit themselves
        program = torch.export.export(net, (x,), dynamic_shapes=shapes)
        torch.export.save(program, folder / "net.pt2")
        torch.onnx.export(program, dynamo=True, verbose=False).save(folder / "net.onnx")
        torch.jit.trace(net, x).save(folder / "net.ts")
    (folder / "net.py").write_text(SCRIPT)
    return folder


@pytest.mark.parametrize(
    ("options", "model", "stages"),
    [
        (
            InitOptions("net.onnx"),
            {"file": "net.onnx"},
            ("quantize_weights", "export_onnx"),
        ),
        (InitOptions("net.pt2"), {"file": "net.pt2"}, ("export_onnx",)),
        (InitOptions("net.ts", inputs=["x=batch,4"]), {"file": "net.ts"}, ("package_",)),
        (
            InitOptions("net.py", ["classes=5"], inputs=["x=batch,4"]),
            {"factory": "net:Net", "arguments": {"classes": 5}},
            ("quantize_weights", "export_onnx"),
        ),
    ],
    ids=["onnx", "pt2", "ts", "script"],
)
def test_a_file_gets_the_stages_that_take_it(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options, model, stages
) -> None:
    monkeypatch.chdir(exported)
    file = tmp_path / "p.yaml"
    found = write_draft(file, options)
    content = yaml.safe_load(file.read_text())
    assert all(got.startswith(name) for got, name in zip(found.stages, stages, strict=True))
    for key, value in model.items():
        where = (tmp_path / str(content["model"][key])).resolve()
        assert where == exported / value if key == "file" else content["model"][key] == value
    if "factory" in model:
        assert (tmp_path / content["code"]).resolve() == exported
    assert "label_agreement" not in file.read_text(), "nobody said that the outputs are scores"
    assert check_pipeline(file, models=True).content["valid"]


def test_a_file_that_has_its_weights_is_not_trained_anew(exported: Path, user: Path) -> None:
    (user / "net.onnx").write_bytes((exported / "net.onnx").read_bytes())
    found = write_draft(user / "p.yaml", InitOptions("net.onnx", data="nets:blobs"))
    assert [*found.stages] == ["quantize_dynamic", "export_onnx"]


@pytest.mark.slow  # importing transformers is what takes long
@pytest.mark.parametrize(
    ("name", "labels", "task", "inputs", "gate"),
    [
        ("Bert", 3, "classification", ["input_ids", "attention_mask"], "label_agreement"),
        ("Bert", 1, "regression", ["input_ids", "attention_mask"], "parity"),
        ("ViT", 3, "classification", ["pixel_values"], "label_agreement"),
    ],
)
def test_a_hugging_face_folder_needs_nothing_else(
    user: Path, name: str, labels: int, task: str, inputs: list[str], gate: str
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    own = {"image_size": 32} if name == "ViT" else {"vocab_size": 40}
    config = getattr(transformers, f"{name}Config")(
        **sizes, **own, intermediate_size=24, num_labels=labels
    )
    kind = "Image" if name == "ViT" else "Sequence"
    getattr(transformers, f"{name}For{kind}Classification")(config).save_pretrained("folder")
    found = write_draft(user / "p.yaml", InitOptions("folder"))
    content = yaml.safe_load(found.text)
    quantized = "quantize_weights" if task == "regression" else "quantize_dynamic"
    assert found.stages == (quantized, "export_onnx")
    assert content["task"] == task
    assert [each["name"] for each in content["model"]["inputs"]] == inputs
    assert content["model"].get("axes", {}) == (
        {} if own.get("image_size") else {"length": {"max": 512}}
    )
    assert content["stages"][-1]["gates"][0]["gate"] == gate
    written = [line for line in found.text.splitlines() if not line.strip().startswith("#")]
    assert len(written) <= 15


@pytest.mark.slow  # importing transformers is what takes long
def test_an_encoder_gets_a_head_for_the_labels_of_the_data(user: Path) -> None:
    transformers = pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    transformers.ViTModel(config).save_pretrained("folder")
    transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained("folder")
    for name in ("ape", "bear", "cat"):
        (user / "photos" / name).mkdir(parents=True)
        for i in range(5):
            image.new("RGB", (8, 8), (40 * i, 0, 0)).save(user / f"photos/{name}/{i}.png")
    options = InitOptions("folder", data="photos")
    content = yaml.safe_load(draft(user / "p.yaml", options).text)
    assert content["model"]["task"] == "image-classification"
    assert content["model"]["labels"] == ["ape", "bear", "cat"]
    assert content["stages"][0]["stage"] == "train" and content["task"] == "classification"
    kept = draft(user / "p.yaml", replace(options, task="embedding"))
    assert "labels" not in kept.text and "train" not in kept.stages


@pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")
def test_an_architecture_of_timm_declares_its_images(user: Path) -> None:
    found = write_draft(user / "p.yaml", InitOptions("timm:test_vit"))
    model = yaml.safe_load(found.text)["model"]
    assert model["timm"] == "test_vit"
    assert model["inputs"] == [{"name": "x", "shape": ["batch", 3, 160, 160]}]


@pytest.mark.parametrize(
    ("shape", "targets", "task"),
    [
        ((2, 5), torch.tensor([1, 4]), "classification"),
        ((2, 3, 4, 4), torch.ones(2, 4, 4, dtype=torch.long), "segmentation"),
        ((2, 4, 3), torch.ones(2, 4, dtype=torch.long), "token-classification"),
        ((2, 3), torch.tensor([[0.0, 1, 1], [1, 0, 1]]), "multilabel"),
        ((2, 1), torch.tensor([0.0, 1.0]), "classification"),
        ((2, 2), torch.tensor([[0.5, 7], [1, 2]]), "regression"),
        ((2, 2), torch.zeros(2, 9), None),
    ],
)
def test_the_task_follows_from_outputs_and_targets(shape, targets, task) -> None:
    inferred = infer_task(targets, torch.zeros(shape))
    assert (inferred.name if inferred else None) == task


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (InitOptions(), "needs a model: a Hugging Face folder, timm:"),
        (InitOptions("nets:mlp"), "needs what the model takes: --input"),
        (
            InitOptions("nets.py", inputs=["x=batch,4"]),
            "--model: nets.py has 2 classes of torch.nn.Module; name one, as nets.py:NAME: Recur",
        ),
        (InitOptions("absent:mlp", inputs=["x=batch,4"]), "--model: cannot import 'absent'"),
        (
            InitOptions("nets:mpl", inputs=["x=batch,4"]),
            r"--model: .*no callable 'mpl'; it has .*mlp",
        ),
        (
            InitOptions("nets:nothing", inputs=["x=batch,4"]),
            "--model: .*returned int, expected torch",
        ),
        (
            InitOptions("nets:mlp", ["hiden=3"], inputs=["x=batch,4"]),
            "--model: .*unexpected keyword",
        ),
        (
            InitOptions("nets:mlp", ["hidden"], inputs=["x=batch,4"]),
            "--argument 'hidden': expected name=",
        ),
        (InitOptions("net.py"), "--model 'net.py': there is no such file or folder here"),
        (InitOptions("."), "--model: . is a folder without config.json"),
        (
            InitOptions("nets.py:Sized", ["width=4"], inputs=["x=batch,4"]),
            "--model: nets:Sized takes classes, without a default; give --argument classes=",
        ),
        (
            InitOptions("nets.onnx", checkpoint="a.pt"),
            r"--checkpoint goes with a factory or timm:NAME; of nets\.onnx it has its weights",
        ),
        (InitOptions("nets:mlp", data="nets:blobs", task="guess"), "--task 'guess' is not one of"),
        (InitOptions("nets:mlp", inputs=["x=batch,5"]), "--(input|model): .*does not take x"),
        (
            InitOptions("nets:mlp", inputs=["x=batch,0"]),
            "--input 'x=batch,0': a dimension is a size",
        ),
        (
            InitOptions("nets:mlp", inputs=["x=batch,4:float"]),
            "--input 'x=batch,4:float': .*'float32'",
        ),
        (InitOptions("nets:mlp", inputs=["batch,4"]), "--input 'batch,4': .*expected name=batch"),
        (InitOptions("nets:mlp", inputs=["x="]), "--input 'x=': a dimension .* for a scalar"),
        (
            InitOptions("nets:mlp", inputs=["x=:float32"]),
            "pipeline.yaml: inputs: the first axis of the first one is the batch, and 'x' has none",
        ),
        (
            InitOptions("nets:mlp", checkpoint="a.pt", inputs=["x=batch,4"]),
            r"--checkpoint: .*a\.pt",
        ),
        (InitOptions("nets:mlp", data="nets:nothing"), "--data: .*returned a int, expected"),
        (InitOptions("nets:mlp", data="nets:absent"), "--data: .*no callable 'absent'"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_written(
    user: Path, options: InitOptions, message: str
) -> None:
    with pytest.raises(CompressError, match=message) as caught:
        write_draft(user / "pipeline.yaml", options)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 2
    assert not (user / "pipeline.yaml").exists()


def test_what_is_missing_is_asked_for_and_wrong_answers_are_asked_again() -> None:
    answers = {"Which model": "nets:mlp", "Which file": "none", "Which data": "none"}
    answers |= {"Which format": "aot", "What shall": "faster"}
    answers |= {"Which inputs": "x=batch,4 y=batch,2:int64"}
    questions = []

    def ask(question, usual, check):
        assert question.endswith("?") and len(question) < 78  # a sentence, on a line of its own
        questions.append(" ".join(question.split()[:2]))
        mistakes = {"Which model": ["nets"], "Which inputs": ["x"], "What shall": ["slower"]}
        for wrong in mistakes.get(questions[-1], []):
            with pytest.raises(PipelineInvalid):
                check(wrong)
        check(answers[questions[-1]])
        return answers[questions[-1]]

    options = prompt_for_missing(InitOptions(), ask)
    assert options == InitOptions(
        "nets:mlp", inputs=["x=batch,4", "y=batch,2:int64"], target="aot", goal="faster"
    )
    assert questions == [*answers]
    questions.clear()
    assert prompt_for_missing(InitOptions("nets:mlp", data="nets:blobs"), ask).inputs == ()
    assert questions == []


@pytest.mark.slow
def test_a_file_that_was_written_runs_and_its_gates_pass(tmp_path: Path) -> None:
    for file in (EXAMPLES / "custom").glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    file = tmp_path / "pipeline.yaml"
    # The speed is the machine's, and not what is tested.
    write_draft(file, InitOptions("my_model:classifier", data="my_data:splits", goal="smaller"))
    report = Pipeline.from_yaml(file).run(tmp_path / "out")
    assert [stage.name for stage in report.stages] == ["train", "quantize_weights", "export_onnx"]
    assert report.status == "passed"


def test_a_model_of_numbers_gets_a_loss_and_a_metric_that_it_can_have(user: Path) -> None:
    (user / "regression.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n"
        "def data():\n    x = torch.randn(60, 4)\n"
        "    return {n: TensorDataset(x, x[:, :3] * 2) for n in ('train', 'val')}\n"
    )
    found = draft(user / "p.yaml", InitOptions("nets:mlp", data="regression:data"))
    content = yaml.safe_load(found.text)
    assert (content["task"], content["metric"]) == ("regression", "r2")
    assert found.stages[0] == "train"
    assert "label_agreement" not in found.text
