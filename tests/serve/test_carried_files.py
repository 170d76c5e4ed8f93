"""A Hugging Face folder's tokenizer, preprocessing and labels, from the folder to the servers."""

import io
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from compress import EagerModel, GraphModel
from compress.artifacts.artifact import Artifact
from compress.artifacts.hf_folder import files_to_carry, read_folder
from compress.artifacts.importing import import_module
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.signature import AxisBounds, Signature, TensorSpec
from compress.core.context import Context
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.serve.image import container_image
from compress.serve.image.container_image import write_build_folder
from compress.serve.packaging.request_forms import ImageInput, forms_of, image_input
from compress.serve.repository import PackageKServe, PackageTriton, refuse_foreign_entries
from compress.serve.torchserve.mar_file import read_mar
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.worker.wire import create_readers
from tests.serve.served_here import Served, serving

transformers = pytest.importorskip("transformers")

LONGEST = 12
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS), "!", "good"]
NAMES = ("bad", "so so", "good")
TEXTS = (
    *("", " ", "good", "Good!", "not good at all", "A B C", "é è ü", "naïve", "日本語", "😀 good"),
    *("a" * 500, "good " * 40, "\t\n", "[CLS] good [SEP]", "[PAD]", "x-y_z", "1234", "ГООД", "!!!"),
    "good\u0000bad",
)


def tokenizer(**settings: object) -> "transformers.PreTrainedTokenizerFast":
    """Return a lower-casing WordPiece tokenizer of letters."""
    table = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordPiece(table, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, sep_token="[SEP]", **tokens, **settings
    )


def imported(folder: Path, path: Path, names: tuple[str, ...]) -> EagerModel:
    """Return the artifact of a folder, as a pipeline imports it."""
    specs = tuple(TensorSpec(name=n, shape=("batch", "length"), dtype="int64") for n in names)
    signature = Signature(inputs=specs, axes={"length": AxisBounds(min=2, max=LONGEST)})
    recipe, module = read_folder(folder, None, untrained_head=False)
    return import_module(path, recipe, module, signature, carried=files_to_carry(folder, module))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny text classifier, with its tokenizer."""
    place = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        intermediate_size=24,
        vocab_size=len(WORDS),
        max_position_embeddings=LONGEST,
        id2label=dict(enumerate(NAMES)),
        label2id={name: i for i, name in enumerate(NAMES)},
        **sizes,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(place)
    tokenizer(model_max_length=LONGEST).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def source(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EagerModel:
    names = ("input_ids", "attention_mask", "token_type_ids")
    return imported(folder, tmp_path_factory.mktemp("source") / "source", names)


@pytest.fixture(scope="module")
def exported(source: EagerModel, tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    """Return the ONNX file of a derived model: what a stage before the export wrote."""
    place = tmp_path_factory.mktemp("onnx")
    derived = source.derive(place / "derived", source.load())
    return ExportOnnx().run_checked(derived, Context(root=place / "onnx"))


@pytest.fixture(scope="module")
def served(exported: OnnxModel) -> Iterator[Served]:
    with serving(exported.path, "--max-rows", "24") as server:
        yield server


def expected(folder: Path, texts: list[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return transformers' own token ids and logits."""
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokens(texts, padding=True, truncation=True, return_tensors="pt")
    ids["token_type_ids"] = torch.zeros_like(ids["input_ids"])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        logits = model(**ids).logits
    return {name: tensor.numpy() for name, tensor in ids.items()}, logits.numpy()


@pytest.mark.slow
def test_texts_become_the_ids_that_transformers_gives_them(folder, exported) -> None:
    forms = forms_of(exported)
    assert exported.class_names == NAMES and "text" in forms
    settings = {"text": forms["text"].handler_settings(exported.signature)}
    read = create_readers(settings, exported.signature.input_descriptions(), exported.path)
    ids, _ = expected(folder, list(TEXTS))
    for spec, array in zip(exported.signature.inputs, read["text/plain"]([*TEXTS]), strict=True):
        assert array.shape == (len(TEXTS), LONGEST)
        assert np.array_equal(array, ids[spec.name]), spec.name


def test_sides_and_longest_text_are_the_folders(folder, tmp_path) -> None:
    place = tmp_path / "left"
    transformers.BertForSequenceClassification.from_pretrained(folder).save_pretrained(place)
    left = {"padding_side": "left", "truncation_side": "left"}
    tokenizer(model_max_length=7, **left).save_pretrained(place)
    model = imported(place, tmp_path / "source", ("input_ids", "attention_mask"))
    settings = {"text": forms_of(model)["text"].handler_settings(model.signature)}
    read = create_readers(settings, model.signature.input_descriptions(), model.path)
    ids, _ = expected(place, ["good", "a b c d e f g h"])
    arrays = read["text/plain"](["good", "a b c d e f g h"])
    assert arrays[0].shape == (2, 7) and arrays[0][0, 0] == 0
    for spec, array in zip(model.signature.inputs, arrays, strict=True):
        assert np.array_equal(array, ids[spec.name]), spec.name


def test_the_folder_of_an_artifact_opens_in_transformers(folder, exported) -> None:
    ours = transformers.AutoTokenizer.from_pretrained(exported.path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    config = transformers.AutoConfig.from_pretrained(exported.path)
    assert config.id2label == dict(enumerate(NAMES))
    assert config.architectures == ["BertForSequenceClassification"]


def test_the_folder_of_an_onnx_artifact_is_what_optimum_opens(exported) -> None:
    # optimum itself needs transformers 4; it takes these names of the file, inputs and outputs.
    assert exported.payload_path.name == "model.onnx"
    proto = onnx.load(exported.payload_path)
    names = {node.name for node in proto.graph.input}
    assert names == {"input_ids", "attention_mask", "token_type_ids"}
    assert [node.name for node in proto.graph.output] == ["logits"]
    settings = json.loads((exported.path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_the_built_in_server_answers_a_text_with_labels(folder, served) -> None:
    _, logits = expected(folder, ["not good!"])
    status, _, body = served.ask(b"not good!", {"Content-Type": "text/plain; charset=utf-8"})
    answer = json.loads(body)
    assert status == 200
    assert np.allclose(answer["outputs"]["logits"], logits, atol=1e-4)
    chances = torch.tensor(logits[0]).softmax(0)
    best = [NAMES[i] for i in chances.argsort(descending=True)]
    assert [each["label"] for each in answer["labels"][0]] == best
    assert answer["labels"][0][0]["probability"] == pytest.approx(float(chances.max()), abs=1e-4)


def test_the_built_in_server_answers_several_texts(folder, served) -> None:
    _, logits = expected(folder, list(TEXTS))
    for body in ([*TEXTS], {"inputs": [*TEXTS]}):
        status, _, answer = served.ask(json.dumps(body).encode())
        assert status == 200
        assert np.allclose(json.loads(answer)["outputs"]["logits"], logits, atol=1e-4)
    status, _, answer = served.ask(json.dumps(["good"] * 25).encode())
    assert status == 413 and b"25 rows, at most 24" in answer


def test_the_protocol_answers_labels_only_where_they_are_requested(served) -> None:
    text = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["good"]}
    _, _, body = served.ask(json.dumps({"inputs": [text]}).encode())
    assert [each["name"] for each in json.loads(body)["outputs"]] == ["logits"]
    request = {"inputs": [text], "outputs": [{"name": "labels"}]}
    _, _, body = served.ask(json.dumps(request).encode())
    (labels,) = json.loads(body)["outputs"]
    assert labels["datatype"] == "BYTES" and set(labels["data"]) == set(NAMES)


def test_a_triton_repository_names_classes_and_says_what_clients_prepare(
    exported: OnnxModel, tmp_path: Path
) -> None:
    repository = PackageTriton(model_name="text")(exported, Context(root=tmp_path / "triton"))
    service = PackageKServe(storage_uri="s3://bucket/text")(
        repository, Context(root=tmp_path / "kserve")
    )
    for folder in (repository.path / "text", service.path / "model_repository/text"):
        assert (folder / "labels.txt").read_text().splitlines() == [*NAMES]
        config = (folder / "config.pbtxt").read_text()
        assert 'label_filename: "labels.txt"' in config
        (line,) = (line for line in config.splitlines() if 'string_value: "{' in line)
        prepared = json.loads(json.loads(line.partition(": ")[2]))
        assert prepared["text"]["max_length"] == LONGEST
        assert (folder / prepared["text"]["tokenizer"]).is_file()
    for artifact in (repository, service):
        artifact.verify()
    copy = shutil.copytree(repository.path, tmp_path / "copy")
    (copy / "text/more.py").write_text("")
    with pytest.raises(ArtifactInvalid, match="is not of model text"):
        refuse_foreign_entries(copy, ["text/config.pbtxt", "text/more.py"], "text")


def test_the_printed_command_sends_a_text(served) -> None:
    assert "Content-Type: text/plain" in served.curl


def test_a_text_that_is_none_is_a_mistake(served) -> None:
    for body in (b"", b"\xff\xfe"):
        status, _, _ = served.ask(body, {"Content-Type": "text/plain"})
        assert status == 400


def test_an_onnx_file_says_its_labels_and_preprocessing(exported) -> None:
    proto = onnx.load(exported.payload_path)
    properties = {entry.key: json.loads(entry.value) for entry in proto.metadata_props}
    assert properties["class_names"] == [*NAMES]
    assert properties["id2label"] == {"0": "bad", "1": "so so", "2": "good"}
    text = properties["preprocessing"]["text"]
    assert text["tokenizer_sha256"] == exported.manifest.files["tokenizer.json"].sha256
    assert text["truncation"]["max_length"] == LONGEST
    assert text["padding"]["pad_token"] == "[PAD]"


@pytest.mark.slow
def test_an_archive_takes_what_its_settings_leave_out(source, tmp_path, caplog) -> None:
    stage = PackageTorchServe(class_names=("x", "y", "z"))
    with caplog.at_level(logging.INFO):
        archive = stage.run(source, Context(root=tmp_path / "mar"))
    assert "files: text; from this stage's settings: class_names" in caplog.text
    members = read_mar(archive.payload_path)
    settings = yaml.safe_load(members["model-config.yaml"])["handler"]
    assert settings["classes"]["names"] == ["x", "y", "z"]
    assert settings["text"]["max_length"] == LONGEST
    assert members["tokenizer.json"] == (source.path / "tokenizer.json").read_bytes()
    assert "config.json" not in members
    assert str(tmp_path) not in (archive.path / "manifest.json").read_text()


def test_a_graph_carries_the_files_and_verification_sees_them(source, tmp_path) -> None:
    graph = GraphModel.from_eager(source, tmp_path / "graph")
    assert graph.carried_files() == source.carried_files()
    assert graph.class_names == NAMES
    file = graph.path / "tokenizer.json"
    changed = file.read_text().replace('"good"', '"evil"')
    file.chmod(0o644)
    file.write_text(changed)
    with pytest.raises(ArtifactInvalid, match=r"tokenizer\.json is not the file that was sealed"):
        Artifact.from_directory(graph.path).verify()
    with pytest.raises(ArtifactInvalid, match=r"tokenizer\.json is not the file that was sealed"):
        forms_of(graph)


def test_a_tokenizer_that_cannot_be_read_is_left_out_with_a_warning(
    folder, tmp_path, caplog
) -> None:
    place = tmp_path / "broken"
    transformers.BertForSequenceClassification.from_pretrained(folder).save_pretrained(place)
    (place / "tokenizer.json").write_text("{}")
    model = imported(place, tmp_path / "source", ("input_ids", "attention_mask"))
    assert "its tokenizer is not carried" in caplog.text
    assert set(model.carried_files()) == {"config.json"}
    assert "text" not in forms_of(model)


def test_an_image_to_deploy_has_what_reads_its_texts(exported, tmp_path, monkeypatch) -> None:
    asked: list[str] = []

    def refuse(*arguments: str) -> str:
        asked.extend(arguments)
        raise StageFailed("no index here")

    monkeypatch.setattr(container_image, "run_pip", refuse)
    with pytest.raises(StageFailed, match="no index here"):
        write_build_folder(exported.path, tmp_path / "image", lambda file: file.write_text("{}"))
    assert any(pin.startswith("tokenizers==") for pin in asked)
    assert not any(pin.startswith("pillow==") for pin in asked)


def test_a_tokenizer_of_other_inputs_is_not_used(source, tmp_path, caplog) -> None:
    pixels = Signature(inputs=(TensorSpec(name="pixels", shape=("batch", 3, 8, 8)),))
    recipe = source.recipe
    state = source.load().state_dict()
    carried = source.carried_files()
    model = EagerModel.create(tmp_path / "m", recipe, state, pixels, carried=carried)
    assert "text" not in forms_of(model)
    assert "tokenizer.json is not used: text: input pixels" in caplog.text


ORIENTATION = 0x0112
"""EXIF's tag of how the camera was held."""
PROCESSORS = {
    "squashed": ("ViTImageProcessor", {"size": {"height": 16, "width": 16}}),
    "shorter side, crop": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 21}, "crop_size": {"height": 16, "width": 16}},
    ),
    "squashed, crop": (
        "DeiTImageProcessor",
        {"size": {"height": 21, "width": 23}, "crop_size": {"height": 16, "width": 16}},
    ),
    "crop_pct": ("ConvNextImageProcessor", {"size": {"shortest_edge": 16}, "crop_pct": 0.8}),
    "no mean": (
        "ViTImageProcessor",
        {"size": {"height": 16, "width": 16}, "do_normalize": False, "rescale_factor": 1 / 127.5},
    ),
    "no scale": (
        "ViTImageProcessor",
        {"size": {"height": 16, "width": 16}, "do_rescale": False, "resample": 0},
    ),
}


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("shape", [(37, 50), (64, 19)])
def test_images_become_the_pixels_that_transformers_gives_them(kind, shape) -> None:
    name, settings = PROCESSORS[kind]
    processor = getattr(transformers, f"{name}Pil")(**settings)
    spec = TensorSpec(name="pixel_values", shape=("batch", 3, 16, 16))
    form = image_input(json.loads(processor.to_json_string()))
    assert isinstance(form, ImageInput)
    readers = create_readers(
        {"image": form.handler_settings(Signature(inputs=(spec,)))},
        [spec.model_dump(mode="json")],
        Path(),
    )
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    image = Image.fromarray(noise)
    stream = io.BytesIO()
    image.save(stream, "png")
    (array,) = readers["image/png"](stream.getvalue())
    pixels = processor(image, return_tensors="np")["pixel_values"]
    scale = max(1.0, float(np.abs(pixels).max()))
    assert np.allclose(array, pixels, atol=1e-5 * scale)


def test_an_image_is_turned_as_its_camera_was_held() -> None:
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    spec = TensorSpec(name="pixel_values", shape=("batch", 3, 16, 16))
    form = image_input(json.loads(processor.to_json_string()))
    assert form is not None
    settings = form.handler_settings(Signature(inputs=(spec,)))
    readers = create_readers({"image": settings}, [spec.model_dump(mode="json")], Path())
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (37, 50, 3), np.uint8))
    for orientation in range(1, 9):
        image.getexif()[ORIENTATION] = orientation
        for form_of_file in ("png", "jpeg"):
            stream = io.BytesIO()
            image.save(stream, form_of_file, exif=image.getexif())
            with Image.open(stream) as opened:
                loaded = transformers.image_utils.load_image(opened)
            pixels = processor(loaded, return_tensors="np")["pixel_values"]
            (array,) = readers[f"image/{form_of_file}"](stream.getvalue())
            assert np.allclose(array, pixels, atol=1e-5), (orientation, form_of_file)


def test_an_image_whose_camera_wrote_an_odd_entry_is_turned_too() -> None:
    spec = TensorSpec(name="x", shape=("batch", 1, 2, 3))
    settings = ImageInput(mean=(0.0,), std=(1.0,)).handler_settings(Signature(inputs=(spec,)))
    read = create_readers({"image": settings}, [spec.model_dump(mode="json")], Path())
    entries = Image.Exif()
    entries[ORIENTATION], entries[0x0100] = 6, 5
    stream = io.BytesIO()
    image = Image.fromarray(np.array([[255, 0]] * 3, np.uint8))
    image.save(stream, "jpeg", exif=entries)
    # The width as text, which Pillow reads and cannot write.
    entry, as_text = b"\x01\x00\x00\x04", b"\x01\x00\x00\x02"
    body = stream.getvalue().replace(entry, as_text)
    assert body != stream.getvalue()
    (array,) = read["image/jpeg"](body)
    assert (array[0, 0] > 0.9).tolist() == [[True, True, True], [False, False, False]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_pad": True}, "does do_pad"),
        ({"size": {"longest_edge": 16}}, "resizes to"),
        ({"size": {"shortest_edge": 16}}, "without cropping"),
        ({"do_resize": False}, "resizes to"),
    ],
)
def test_preprocessing_that_is_not_computed_here_is_not_guessed(settings, message) -> None:
    config = {"do_resize": True, "size": {"height": 16, "width": 16}, "do_normalize": False}
    with pytest.raises(StageFailed, match=message):
        image_input({**config, **settings})
