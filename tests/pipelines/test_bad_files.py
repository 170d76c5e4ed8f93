"""Every mistake a newcomer makes in pipeline.yaml is one clear line with its place."""

import os
from pathlib import Path

import pytest

from compress.common.errors import CompressError, PipelineInvalid
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.inputs import check_model

GOOD = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data"}
stages:
  - stage: train
    epochs: 1
  - stage: export_onnx
    gates: [{gate: parity, atol: 1e-4}]
"""

MISTAKES = {
    "misspelt stage": (
        ("stage: export_onnx", "stage: exprt_onnx"),
        r"p\.yaml:9: stages\[1\] \(exprt_onnx\): unknown stage 'exprt_onnx'; "
        r"did you mean 'export_onnx'\?",
    ),
    "removed stage": (
        ("stage: export_onnx", "stage: quantize_native"),
        r"p\.yaml:9: stages\[1\] \(quantize_native\): stage 'quantize_native' was removed, .*"
        r"write 'quantize_static'",
    ),
    "misspelt key of a stage": (
        ("epochs: 1", "epoch: 1"),
        r"p\.yaml:8: stages\[0\] \(train\)\.epoch: unknown key; did you mean 'epochs'\?",
    ),
    "misspelt key of a gate": (
        ("atol:", "tol:"),
        r"p\.yaml:10: stages\[1\] \(export_onnx\)\.gates\[0\] \(parity\)\.tol: "
        r"unknown key; did you mean 'atol'\?",
    ),
    "misspelt gate": (("gate: parity", "gate: party"), r"did you mean 'parity'\?"),
    "misspelt top-level key": (
        ("stages:", "stagse:"),
        r"p\.yaml:6: stagse: unknown key; did you mean 'stages'\?",
    ),
    "no stage key": (
        ("stage: train\n    epochs: 1", "epochs: 1"),
        r"stages\[0\]: has no key 'stage'",
    ),
    "a stage as a bare word": (
        ("- stage: train\n    epochs: 1", "- train"),
        r"p\.yaml:7: stages\[0\]",
    ),
    "wrong type": (("epochs: 1", "epochs: many"), r"p\.yaml:8: .*epochs: .*integer.*found 'many'"),
    "out of range": (("epochs: 1", "epochs: -1"), r"p\.yaml:8: .*epochs: .*found -1"),
    "unknown version": (("version: 1", "version: 7"), r"p\.yaml:1: version: .*found 7"),
    "missing key": (("  factory: nets:mlp\n", ""), r"p\.yaml:2: model\.factory: is required"),
    "factory without a colon": (("nets:mlp", "nets.mlp"), r"model\.factory: .*found 'nets\.mlp'"),
    "key twice": (
        ("    epochs: 1", "    epochs: 1\n    epochs: 2"),
        r"p\.yaml:9: key 'epochs' stands twice; first on line 8",
    ),
    "not YAML": (("version: 1", "version: [1"), r"p\.yaml:\d+: not valid YAML"),
    "unknown device": (("version: 1", "version: 1\ndevice: gpu"), r"p\.yaml:2: device: .*'gpu'"),
    "wrong order": (
        ("- stage: export_onnx", "- stage: package_torchserve\n  - stage: export_onnx"),
        r"p\.yaml:10: stages\[2\] \(export_onnx\): reads eager or graph.*_torchserve' writes torch",
    ),
    "unknown input": (
        ("stage: export_onnx", "stage: export_onnx\n    input: trian"),
        r"p\.yaml:10: stages\[1\]\.input: no earlier stage is named 'trian'; did you mean 'train'",
    ),
    "unknown against": (
        ("atol: 1e-4", "atol: 1e-4, against: later"),
        r"gates\[0\]\.against: no earlier stage is named 'later'",
    ),
    "a runtime where answers are compared": (
        ("atol: 1e-4", "atol: 1e-4, against: eager"),
        r"gates\[0\]\.against: no earlier stage is named 'eager'; known: source, train",
    ),
    "bounds of no axis": (
        ("[batch, 4]}]", "[batch, 4]}]\n  axes: {words: {min: 2}}"),
        r"p\.yaml:\d: model.*axes: 'words' is not a named axis of the inputs; they have none",
    ),
    "misspelt runtime": (
        ("gate: parity, atol: 1e-4", "gate: min_speedup, ratio: 1, against: onxruntime"),
        r"gates\[0\]\.against: no earlier stage is named 'onxruntime'; did you mean 'onnxruntime'",
    ),
    "a runtime or a stage": (
        (
            "stage: export_onnx\n    gates: [{gate: parity, atol: 1e-4}]",
            "stage: export_onnx\n    name: eager\n    gates: [{gate: min_speedup, ratio: 1, "
            "against: eager}]",
        ),
        r"gates\[0\]\.against: 'eager' is a runtime, and a stage that is not earlier has that name",
    ),
    "a runtime that cannot run the file": (
        (
            "  factory: nets:mlp\n  inputs: [{name: x, shape: [batch, 4]}]\ndata: "
            '{factory: "nets:data"}\nstages:\n  - stage: train\n    epochs: 1\n'
            "  - stage: export_onnx\n    gates: [{gate: parity, atol: 1e-4}]",
            "  file: a.onnx\nstages:\n  - stage: package_triton\n"
            "    gates: [{gate: min_speedup, ratio: 1, against: compiled}]",
        ),
        r"gates\[0\]\.against: compiled runs eager and graph models, and this one comes in as onnx",
    ),
    "same name twice": (
        ("stage: export_onnx", "stage: export_onnx\n    name: train"),
        r"p\.yaml:9: stages\[1\]: the name 'train' is taken",
    ),
    "data missing": (
        ('data: {factory: "nets:data"}\n', ""),
        r"p\.yaml:6: stages\[0\] \(train\): needs data",
    ),
    "unknown metric": (
        ("version: 1", "version: 1\nmetric: acuracy"),
        r"p\.yaml:2: metric: metric 'acuracy' is unknown; expected accuracy",
    ),
    "key that is no word": (
        ("version: 1", "version: 1\n1: one"),
        r"p\.yaml:2: key '1' is not a word",
    ),
    "alias in itself": (("version: 1", "version: &a [*a]"), r"p\.yaml:1: nested deeper"),
    "only input wrong": (
        ("inputs: [{name: x, shape: [batch, 4]}]", "inputs: [{name: x, shape: [batch, 0]}]"),
        r"p\.yaml:4: model\.inputs\[0\]\.shape\[1\]: a dimension is a size above 0 or a name",
    ),
    "infinite limit": (("atol: 1e-4", "atol: .inf"), r"atol: .*finite"),
    "metric without direction": (
        ("version: 1", "version: 1\nmetric: torchmetrics.Accuracy"),
        r"p\.yaml:2: metric: ",
    ),
    "a date that is none": (
        ("version: 1", "version: 2001-13-45"),
        r"p\.yaml:1: version: .*found '2001-13-45'",
    ),
    "an integer of 5,000 digits": (
        ("epochs: 1", f"epochs: {'1' * 5000}"),
        r"p\.yaml:8: stages\[0\]\.epochs: cannot be read as int: 1+… \(5000 characters\)$",
    ),
    "an integer of 5,000 digits in base 16": (
        ("epochs: 1", f"epochs: 0x{'f' * 5000}"),
        r"p\.yaml:8: stages\[0\]\.epochs: expected an integer of 64 bits, found 0xf+…",
    ),
    "not a number, where any value may be": (
        ('{factory: "nets:data"}', '{factory: "nets:data", arguments: {x: .nan}}'),
        r"p\.yaml:5: data\.arguments\.x: expected a finite number, found \.nan",
    ),
    "a set": (
        ('{factory: "nets:data"}', '{factory: "nets:data", arguments: {x: !!set {a}}}'),
        r"p\.yaml:5: data\.arguments\.x: has the YAML tag 'tag:yaml\.org,2002:set'",
    ),
    "bytes": (
        ("nets:mlp", '!!binary "bmV0czptbHA="'),
        r"p\.yaml:3: model\.factory: has the YAML tag",
    ),
    "an escape sequence": (
        ("nets:mlp", r'"\e[2J"'),
        r"p\.yaml:3: model\.factory: holds the character '\\x1b'",
    ),
    "half a character": (
        ("nets:mlp", r'"\ud800"'),
        r"p\.yaml:3: model\.factory: holds the character '\\ud800'",
    ),
    "an explicit tag that does not fit": (
        ("epochs: 1", 'epochs: !!int ""'),
        r"p\.yaml:8: stages\[0\]\.epochs: cannot be read as int",
    ),
    "a list as a key": (("version: 1", "version: 1\n? [a]\n: 1"), r"a key is a list or a mapping"),
    "unknown teacher": (
        (
            "stage: export_onnx",
            "stage: distill\n    epochs: 1\n    teacher: nobody\n  - stage: export_onnx",
        ),
        r"p\.yaml:11: stages\[1\]\.teacher: no earlier stage is named 'nobody'",
    ),
    "neither one of some words nor keys": (
        ("epochs: 1", "epochs: 1\n    compile: true"),
        r"^\S+p\.yaml:9: stages\[0\] \(train\)\.compile: expected 'none', 'blocks', "
        r"'whole' or keys and values, found True$",
    ),
    "misspelt key where a word may be": (
        ("epochs: 1", "epochs: 1\n    compile: {modee: default}"),
        r"p\.yaml:9: stages\[0\] \(train\)\.compile\.modee: unknown key; did you mean 'mode'\?$",
    ),
    "out of range where a word may be": (
        ("epochs: 1", "epochs: 1\n    activation_checkpointing: 0"),
        r"\.activation_checkpointing: input should be greater than 0, found 0$",
    ),
    "wrong item where a number may be": (
        ("epochs: 1", "epochs: 1\n    parallel: {wrap: [1]}"),
        r"\.parallel\.wrap\[0\]: expected a valid string, found 1$",
    ),
    "wrong value in one of two forms": (
        ("stage: train", "stage: distill\n    teacher: {onnx: 3}"),
        r"p\.yaml:8: .*\.teacher\.onnx: expected a valid string, found 3$",
    ),
}


def _load(path: Path) -> None:
    build_plan(Pipeline.from_yaml(path))


def test_the_good_file_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(GOOD)
    _load(tmp_path / "p.yaml")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, mistake: str) -> None:
    (old, new), expected = MISTAKES[mistake]
    assert old in GOOD
    file = tmp_path / "p.yaml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(PipelineInvalid, match=expected) as error:
        _load(file)
    # "stages" itself missing follows from its misspelling, and is true as well.
    allowed = 2 if mistake == "misspelt top-level key" else 1
    assert len(str(error.value).splitlines()) <= allowed


def test_two_mistakes_are_two_lines(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(GOOD.replace("epochs: 1", "epoch: 1").replace("atol:", "tol:"))
    with pytest.raises(PipelineInvalid) as error:
        _load(file)
    text = str(error.value)
    assert "did you mean 'epochs'" in text
    assert "did you mean 'atol'" in text


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "No such file"), ("", "found nothing"), ("- 1", "found a list"), (b"\xff\xfe", "text")],
)
def test_what_is_no_pipeline_file_is_said(tmp_path: Path, content, found: str) -> None:
    file = tmp_path / "p.yaml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.write_text(content)
    with pytest.raises(PipelineInvalid, match=found):
        Pipeline.from_yaml(file)


@pytest.mark.timeout(60)
def test_what_has_no_end_is_no_pipeline_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file, kind in ((tmp_path / "pipe", "pipe"), (Path("/dev/zero"), "device")):
        with pytest.raises(PipelineInvalid, match=f"is a {kind}, expected a regular file"):
            Pipeline.from_yaml(file)
    (tmp_path / "p.yaml").write_text("version: " + "a" * 20_000_000)
    with pytest.raises(PipelineInvalid, match="has more than 1048576 bytes"):
        Pipeline.from_yaml(tmp_path / "p.yaml")


def test_a_missing_library_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.common.errors import Unavailable
    from compress.common.requirements import Requirement
    from compress.export.onnx.stage import ExportOnnx

    gone = Requirement(what="no_such_library", install="pip install no-such-library")
    monkeypatch.setattr(ExportOnnx, "requirements", (gone,))
    (tmp_path / "p.yaml").write_text(GOOD)
    with pytest.raises(Unavailable, match=r"p\.yaml:9: .*needs no_such_library.*pip install"):
        _load(tmp_path / "p.yaml")


def test_a_missing_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(GOOD.replace("version: 1", "version: 1\ndevice: cuda:7"))
    with pytest.raises(CompressError, match=r"p\.yaml:2: device: 'cuda:7' asked for"):
        _load(tmp_path / "p.yaml")


def test_a_gate_without_its_data_is_refused_before_anything_runs(tmp_path: Path) -> None:
    text = GOOD.replace('data: {factory: "nets:data"}\n', "")
    text = text.replace("  - stage: train\n    epochs: 1\n", "")
    text = text.replace("{gate: parity, atol: 1e-4}", "{gate: max_drop, points: 1}")
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(PipelineInvalid, match=r"p\.yaml:7: .*\(max_drop\): needs data"):
        _load(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ("max_drop, points: 0.005", r"points: 0\.005 is less than .* for 0\.5 % write 0\.5"),
        ("max_drop, points: 90", r"points: 90 would let more than half of all answers"),
        ("min_metric, at: 97.5", r"at: found 97\.5, .* for 97\.5 % write 0\.975"),
        ("max_size, ratio: 25", r"ratio: 25 would let .* 25 times as large; for 25 % write 0\.25"),
        ("max_parameters, ratio: 45", r"for 45 % write 0\.45"),
        ("label_agreement, minimum: 99", r"less than or equal to 1"),
    ],
)
def test_a_limit_in_another_unit_is_refused(tmp_path: Path, gate: str, words: str) -> None:
    text = GOOD.replace("gate: parity, atol: 1e-4", f"gate: {gate}")
    (tmp_path / "p.yaml").write_text(f"{text}metric: accuracy\n")
    with pytest.raises(PipelineInvalid, match=rf"p\.yaml:\d+: .*{words}"):
        _load(tmp_path / "p.yaml")


@pytest.mark.parametrize("points", [0, 0.01, -1, 50])
def test_a_limit_in_points_is_taken(tmp_path: Path, points: float) -> None:
    gate = f"gate: max_drop, points: {points}"
    (tmp_path / "p.yaml").write_text(GOOD.replace("gate: parity, atol: 1e-4", gate))
    _load(tmp_path / "p.yaml")


def test_a_loss_may_fall_by_any_number_of_points(tmp_path: Path) -> None:
    text = GOOD.replace("gate: parity, atol: 1e-4", "gate: max_drop, points: 0.005")
    (tmp_path / "p.yaml").write_text(text.replace("version: 1", "version: 1\nmetric: loss"))
    _load(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("max_drop: 0.005", r"max_drop: .*; write max_drop_points: 0\.5 for the same limit"),
        ("max_drop_points: 0.005", r"max_drop_points: 0\.005 is less than .* write 0\.5"),
    ],
)
def test_the_limit_of_quantize_mixed_is_in_points(tmp_path: Path, setting: str, words: str) -> None:
    mixed = f"  - {{stage: quantize_mixed, input: train, {setting}}}\n"
    (tmp_path / "p.yaml").write_text(f"{GOOD}{mixed}metric: accuracy\n")
    with pytest.raises(PipelineInvalid, match=words):
        _load(tmp_path / "p.yaml")


def test_memory_that_is_never_seen_is_refused_before_anything_runs(tmp_path: Path) -> None:
    gate = "gates: [{gate: max_memory, mebibytes: 9}]"
    (tmp_path / "p.yaml").write_text(f"{GOOD}  - stage: package_torchserve\n    {gate}\n")
    refused = r"p\.yaml:12: .*\(max_memory\): cannot be measured: TorchServe runs"
    with pytest.raises(PipelineInvalid, match=refused):
        _load(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "image: {layout: hwc}",
            r"image: the inputs are \{'x': \['batch', 4\]\}, expected one with",
        ),
        ("text: {tokenizer: words.json}", r"text: .*words\.json: not a tokenizer"),
    ],
)
def test_requests_that_do_not_fit_the_model_are_refused_before_anything_runs(
    tmp_path: Path, setting: str, words: str
) -> None:
    (tmp_path / "words.json").write_text("{}")
    text = GOOD.replace('data: {factory: "nets:data"}\n', "").replace(
        "- stage: train\n    epochs: 1\n  ", ""
    )
    text += f"  - stage: package_torchserve\n    {setting}\n"
    (tmp_path / "p.yaml").write_text(text)
    pipeline = Pipeline.from_yaml(tmp_path / "p.yaml")
    place = r"p\.yaml:\d+: stages\[1\] \(package_torchserve\)"
    with pytest.raises(PipelineInvalid, match=f"{place}.*: {words}"):
        check_model(pipeline)
    with pytest.raises(PipelineInvalid, match=f"{place}.*: {words}"):
        pipeline.run(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_packaging_needs_no_data(tmp_path: Path) -> None:
    text = GOOD.replace('data: {factory: "nets:data"}\n', "")
    text = text.replace("  - stage: train\n    epochs: 1\n", "")
    (tmp_path / "p.yaml").write_text(text + "  - stage: package_torchserve\n")
    _load(tmp_path / "p.yaml")


def _quantized_and_exported(tmp_path: Path, quantized: str, exported: str) -> Path:
    text = GOOD.replace("stage: export_onnx", f"{{{quantized}}}\n  - stage: export_{exported}")
    (tmp_path / "p.yaml").write_text(text)
    return tmp_path / "p.yaml"


@pytest.mark.parametrize(
    ("quantized", "exported", "found"),
    [
        ("stage: quantize_static, activation_bits: 16", "torchscript", "8 bits, found uint16; "),
        ("stage: quantize_static, activation_bits: 16", "aot", "AOTInductor's .*, found uint16;"),
        ("stage: quantize_static, target: tensorrt", "torchscript", "8 bits, found int8; "),
        (
            "stage: quantize_mixed, max_drop_points: 0, target: tensorrt",
            "torchscript",
            "found int8",
        ),
        (
            "stage: quantize_aware_training, epochs: 1, target: onnxruntime-cuda",
            "torchscript",
            "found int8; quantize with target: onnxruntime-cpu and 8 bits",
        ),
        ("stage: convert_precision, dtype: bfloat16", "onnx", "bfloat16, for which onnxruntime"),
        (
            "stage: quantize_static, activation_bits: 16",
            "onnx\n    opset: 20",
            "opset 20 has no 16-bit activations; set opset: 21 or more",
        ),
    ],
)
def test_an_export_without_kernels_is_refused_before_anything_is_quantized(
    tmp_path: Path, quantized: str, exported: str, found: str
) -> None:
    file = _quantized_and_exported(tmp_path, quantized, exported)
    with pytest.raises(PipelineInvalid, match=rf"p\.yaml:10: stages\[2\].*input '\w+': .*{found}"):
        _load(file)


@pytest.mark.parametrize(
    ("quantized", "exported"),
    [
        ("stage: quantize_static, activation_bits: 16", "onnx\n    opset: 21"),
        ("stage: quantize_static, target: inductor-cpu", "torchscript"),
        ("stage: quantize_dynamic", "torchscript"),
        ("stage: quantize_static, target: tensorrt", "aot"),
        ("stage: convert_precision, dtype: bfloat16", "torchscript"),
        ("stage: convert_precision, dtype: float16", "onnx"),
    ],
)
def test_an_export_with_kernels_is_not_refused(
    tmp_path: Path, quantized: str, exported: str
) -> None:
    _load(_quantized_and_exported(tmp_path, quantized, exported))
