"""What requests may look like, beyond raw tensors: the Open Inference Protocol, images, texts."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.signature import Signature
from compress.serve.packaging.request_forms import ImageInput, TextInput
from compress.serve.worker import wire
from compress.serve.worker.tensors import check, top_classes
from compress.serve.worker.wire import (
    HEADER_LENGTH,
    JSON,
    LABELS,
    NPZ,
    RAW,
    TEXT,
    create_readers,
    decode,
    encode,
    from_npz,
    parse_json,
    requested_outputs,
    without_mark,
)

IDS = {"name": "ids", "shape": ["batch", 2], "dtype": "int64"}
SCALE = {"name": "scale", "shape": ["batch"], "dtype": "float32"}
MASK = {"name": "mask", "shape": ["batch", 2], "dtype": "bool"}


def asked(*tensors: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": tensors, **more}).encode()


def tensor(name: str, shape: Any, datatype: str, data: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def test_the_open_inference_protocol_is_read_flat_or_nested_in_any_order() -> None:
    body = asked(
        tensor("mask", [2, 2], "BOOL", [True, False, False, True]),
        tensor("scale", [2], "FP32", [0.5, 1e-3]),
        tensor("ids", [2, 2], "INT64", [[1, 2], [3, 2**62]]),
        id="7",
    )
    (ids, scale, mask), request = decode(body, JSON, {}, [IDS, SCALE, MASK], {})
    assert request["id"] == "7"
    assert ids.dtype == np.int64 and ids.tolist() == [[1, 2], [3, 2**62]]
    assert scale.dtype == np.float32 and scale.tolist() == [0.5, np.float32(1e-3)]
    assert mask.dtype == bool and mask.tolist() == [[True, False], [False, True]]


def test_bytes_behind_a_header_of_any_length_lie_as_native_code_wants_them() -> None:
    raw = np.array([[1, 2]], np.int64).tobytes()
    for spaces in range(8):
        sent = tensor("ids", [1, 2], "INT64", None) | {"parameters": {"binary_data_size": 16}}
        header = asked(sent) + b" " * spaces
        headers = {HEADER_LENGTH: str(len(header))}
        (ids,), _ = decode(header + raw, RAW, headers, [IDS], {})
        assert ids.tolist() == [[1, 2]] and ids.flags.aligned and ids.flags.writeable


def test_a_protocol_request_gets_the_requested_outputs() -> None:
    named = {"y": np.array([[1, 2]], np.float32), "n": np.array([3], np.int64)}
    wanted = requested_outputs({"id": "7", "outputs": [{"name": "n"}]}, [*named])
    body, headers = encode(named, "", wanted, "digits", None)
    assert headers == {"content-type": JSON}
    n = {"name": "n", "shape": [1], "datatype": "INT64", "data": [3]}
    assert json.loads(body) == {"model_name": "digits", "id": "7", "outputs": [n]}
    body, _ = encode(named, RAW, requested_outputs({"inputs": []}, [*named]), "digits", None)
    assert json.loads(body)["outputs"][0] == tensor("y", [1, 2], "FP32", [1, 2])
    lossless, headers = encode(named, NPZ, wanted, "digits", None)
    assert headers == {"content-type": NPZ} and "y" in from_npz(lossless)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (asked({"name": "ids"}), "expected a 'shape'"),
        (asked(tensor("id", [1, 2], "INT64", [1, 2])), r"\['id'\], expected \['ids'\]"),
        (asked(*[tensor("ids", [1, 2], "INT64", [1, 2])] * 2), "given twice"),
        (asked(tensor("ids", [1, 2], "INT32", [1, 2])), "'INT32', expected 'INT64'"),
        (asked(tensor("ids", [1, 3], "INT64", [1, 2])), r"2 elements, expected those of shape"),
        (asked(tensor("ids", [2, 1], "INT64", [[1, 2]])), r"\[1, 2\] elements"),
        (asked(tensor("ids", [1, True], "INT64", [1])), "expected a list of sizes"),
        (asked(tensor("ids", [1, 2], "INT64", [1, 2.5])), "not int64"),
        (asked(tensor("ids", [1, 2], "INT64", ["a", "b"])), "not int64"),
        (asked(tensor("ids", [1, 2], "BYTES", ["a", "b"])), "'BYTES', expected 'INT64'"),
    ],
)
def test_a_tensor_that_is_not_the_models_is_named(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        decode(body, JSON, {}, [IDS], {})
    assert caught.value.args[0] == 400


def test_what_is_no_json_in_utf_8_is_refused() -> None:
    for body in (b"\xff", b"1" * 5000, "[1]".encode("utf-16"), b"[nan]"):
        with pytest.raises(ValueError, match="the body is not JSON"):
            parse_json(body)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_in_json_are_taken_where_the_model_takes_them(word: str) -> None:
    body, spec = f"[[{word}, 1]]".encode(), {"name": "x", "shape": ["n", 2], "dtype": "float32"}
    (array,), _ = decode(body, JSON, {}, [spec], {})
    kind = "nan" if word == "NaN" else "infinities"
    check([array], [{**spec, "not_finite": [kind]}], 8)
    for refused in ({}, {"not_finite": ["infinities" if kind == "nan" else "nan"]}):
        with pytest.raises(ValueError, match=r"x holds (NaN|infinity), expected finite numbers"):
            check([array], [{**spec, **refused}], 8)


def test_json_booleans_are_no_numbers() -> None:
    for dtype in ("float32", "int64", "uint8"):
        with pytest.raises(ValueError, match=f"x holds values that are not {dtype}"):
            decode(b"[[true, 1]]", JSON, {}, [{"name": "x", "shape": ["n", 2], "dtype": dtype}], {})
    (array,), _ = decode(
        b"[[true, 0]]", JSON, {}, [{"name": "x", "shape": ["n", 2], "dtype": "bool"}], {}
    )
    assert array.tolist() == [[True, False]]


def test_a_byte_order_mark_is_ignored() -> None:
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


def test_raw_bytes_with_another_x_dtype_are_refused() -> None:
    (array,), _ = decode(b"\0" * 16, RAW, {"x-dtype": "int64"}, [IDS], {})
    assert array.shape == (1, 2)
    with pytest.raises(ValueError, match="ids is float32, expected int64"):
        decode(b"\0" * 16, RAW, {"x-dtype": "float32"}, [IDS], {})


def test_the_most_probable_classes_come_first() -> None:
    logits = np.array([[0, np.log(3), 0], [1000, 0, 1000]], np.float32)
    classes = {"names": ["a", "b", "c"], "top": 2, "softmax": True}
    rows = top_classes(logits, classes)
    assert [[each["label"] for each in row] for row in rows] == [["b", "a"], ["a", "c"]]
    np.testing.assert_allclose([e["probability"] for e in rows[0]], [0.6, 0.2], rtol=1e-6)
    known = top_classes(np.array([[0.1, 0.9]]), {"names": ["a", "b"], "top": 9, "softmax": False})
    assert known == [[{"label": "b", "probability": 0.9}, {"label": "a", "probability": 0.1}]]
    body, _ = encode({"y": logits}, "", {}, "m", classes)
    assert json.loads(body)["labels"][1][1] == {"label": "c", "probability": 0.5}
    wanted = requested_outputs({"parameters": {"binary_data_output": True}}, ["y", *LABELS])
    body, headers = encode({"y": logits}, "", wanted, "m", classes)
    length = int(headers[HEADER_LENGTH])
    labels, shares = json.loads(body[:length])["outputs"][1:]  # texts are not among the bytes
    assert labels == tensor("labels", [2, 2], "BYTES", ["b", "a", "a", "c"])
    assert shares["datatype"] == "FP64" and shares["shape"] == [2, 2]
    probabilities = np.frombuffer(body[length + logits.nbytes :], "<f8")
    np.testing.assert_allclose(probabilities, [0.6, 0.2, 0.5, 0.5], rtol=1e-6)


def picture(width: int, height: int, mode: str = "RGB", kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(0)
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    stream = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, np.uint8), mode).save(stream, kind)
    return stream.getvalue()


def takes_image(shape: tuple[Any, ...], dtype: str = "float32", **settings: Any) -> Any:
    signature = Signature.model_validate(
        {"inputs": [{"name": "image", "shape": shape, "dtype": dtype}]}
    )
    packed = {"image": ImageInput(**settings).handler_settings(signature)}
    specs = [spec.model_dump(mode="json") for spec in signature.inputs]
    readers = create_readers(json.loads(json.dumps(packed)), specs, Path())
    return lambda body, kind="image/png": decode(body, kind, {}, specs, readers)[0][0]


def test_an_image_becomes_normalized_channels() -> None:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    read = takes_image(("batch", 3, 5, 7), mean=mean, std=std)
    body = picture(7, 5)
    pixels = np.asarray(Image.open(io.BytesIO(body)), np.float64)
    expected = ((pixels / 255 - mean) / std).transpose(2, 0, 1)[None]
    got = read(body)
    assert got.dtype == np.float32 and got.flags["C_CONTIGUOUS"]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_an_image_is_resized_or_center_cropped_and_uint8_stays() -> None:
    body = picture(40, 20, "L", "JPEG")
    squashed = takes_image(("batch", 8, 8, 1), "uint8", layout="hwc")(body, "image/jpeg")
    cut = takes_image(("batch", 8, 8, 1), "uint8", layout="hwc", shorter_side=10)
    grey = Image.open(io.BytesIO(body))
    bilinear = Image.Resampling.BILINEAR
    assert np.array_equal(squashed[0, :, :, 0], np.asarray(grey.resize((8, 8), bilinear)))
    whole = np.asarray(grey.resize((20, 10), bilinear))
    assert np.array_equal(cut(body, "image/jpeg")[0, :, :, 0], whole[1:9, 6:14])


def test_invalid_and_oversized_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    read = takes_image((1, 3, 8, 8))
    body = picture(20, 20)
    for bad in (b"hello", body[:-60], body[:40], picture(4, 4, kind="GIF", mode="L")):
        with pytest.raises(ValueError, match="no PNG or JPEG image, or truncated"):
            read(bad)
    deep = io.BytesIO()
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(deep, "PNG")
    with pytest.raises(ValueError, match="mode is I;16, expected 8 bits"):
        read(deep.getvalue())
    monkeypatch.setattr("compress.serve.worker.wire.MAX_PIXELS", 399)
    with pytest.raises(ValueError, match="400 pixels, at most 399") as caught:
        read(body)
    assert caught.value.args[0] == 413
    scaled = takes_image((1, 3, 8, 8), shorter_side=10)
    with pytest.raises(ValueError, match=r"scaled to \[10, 995\], at most 399") as caught:
        scaled(picture(2, 199))
    assert caught.value.args[0] == 413


@pytest.mark.parametrize(
    ("shape", "settings", "words"),
    [
        (("batch", 4, 8, 8), {}, "of 1 or 3 channels"),
        (("batch", 3, 8), {}, "of 1 or 3 channels"),
        ((2, 3, 8, 8), {}, "any number of rows, or one"),
        (
            ("batch", 3, "h", "w"),
            {},
            r"images of any size.*--input image=batch,3,224,224",
        ),
        (("batch", 3, 8, 8), {"size": (8, 9)}, r"size is \[8, 9\], expected the sizes"),
        (("batch", 3, 8, 8), {"mean": (0.5, 0.5)}, "mean has 2 numbers, expected 3"),
        (("batch", 3, 8, 8), {"shorter_side": 7}, "less than"),
    ],
)
def test_image_settings_that_do_not_fit_the_model_are_refused(
    shape: tuple[Any, ...], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(StageFailed, match=words):
        takes_image(shape, **settings)


WORDS = {"[PAD]": 3, "[UNK]": 0, "good": 1, "bad": 2}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def takes_texts(file: Path, length: Any, *names: str, **settings: Any) -> Any:
    inputs = [{"name": n, "shape": ["batch", length], "dtype": "int64"} for n in names]
    signature = Signature.model_validate({"inputs": inputs})
    packed = {"text": TextInput(tokenizer=str(file), **settings).handler_settings(signature)}
    specs = [spec.model_dump(mode="json") for spec in signature.inputs]
    readers = create_readers(json.loads(json.dumps(packed)), specs, file.parent)
    return lambda body, kind=JSON: [a.tolist() for a in decode(body, kind, {}, specs, readers)[0]]


def test_texts_become_padded_ids_and_masks(tokenizer: Path) -> None:
    read = takes_texts(tokenizer, "length", "attention_mask", "input_ids")
    assert read(b"good bad", TEXT) == [[[1, 1]], [[1, 2]]]
    both = [[[1, 0, 0], [1, 1, 1]], [[1, 3, 3], [2, 0, 1]]]
    assert read(b'["good", "bad odd good"]') == both
    assert read(b'{"inputs": ["good", "bad odd good"]}') == both
    body = asked(tensor("text", [2], "BYTES", ["good", "bad odd good"]))
    assert read(body) == both
    with pytest.raises(ValueError, match=r"has shape \[3\], expected \[2\]"):
        read(asked(tensor("text", [3], "BYTES", ["good", "bad"])))
    with pytest.raises(ValueError, match="not a list of texts"):
        read(asked(tensor("text", [1], "BYTES", [1])))


def test_a_fixed_axis_pads_and_cuts_texts(tokenizer: Path) -> None:
    read = takes_texts(tokenizer, 2, "words", fields={"words": "ids"})
    assert read(b'["good", "bad odd good"]') == [[[1, 3], [2, 0]]]
    shorter = takes_texts(tokenizer, "length", "input_ids", max_length=1, pad_token="bad")
    assert shorter(b'["good bad"]') == [[[1]]]


def test_text_settings_that_do_not_fit_are_refused(tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="input words is int64"):
        takes_texts(tokenizer, 2, "words")
    with pytest.raises(StageFailed, match=r"has no \[P\] token"):
        takes_texts(tokenizer, 2, "input_ids", pad_token="[P]")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(StageFailed, match=r"other\.json: not a tokenizer"):
        takes_texts(tmp_path / "other.json", 2, "input_ids")
    with pytest.raises(ArtifactInvalid, match=r"none\.json: no such file"):
        TextInput(tokenizer="none.json").resolve_paths(tmp_path)
    here, before = (
        TextInput(tokenizer="tokenizer.json").resolve_paths(tmp_path),
        tokenizer.read_text(),
    )
    identity = here.identity()
    tokenizer.write_text(before.replace("good", "fine"))
    assert identity != here.identity() and str(tmp_path) not in str(identity)


@pytest.mark.parametrize("fast", [True, False])
def test_json_is_the_same_without_pydantic(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TorchServe archive may run where only numpy and the model's runtime are installed."""
    if not fast:
        monkeypatch.setattr(wire, "fast_json", None)
        monkeypatch.setattr(wire, "fast_json", None)
    assert wire.parse_json(b'{"data": [1e-7, 2, true]}') == {"data": [1e-7, 2, True]}
    for text, words in ((b"[1", "EOF|delimiter"), (b"[" * 9**5, "too deeply")):
        with pytest.raises(ValueError, match=words):
            wire.parse_json(text)
    floats = np.array([1e-7, 0.1, -3e20, 0.0], np.float32)
    arrays = [floats, np.array([True, False]), np.array([2**64 - 1], np.uint64)]
    assert [json.loads(wire.flat_json(array)) for array in arrays] == [a.tolist() for a in arrays]
    assert json.loads(wire.flat_json(np.array(["ä\ud800", "b"]))) == ["ä\ud800", "b"]


def test_a_body_without_a_byte_order_mark_is_not_copied() -> None:
    body = bytearray(b"[1]")
    assert without_mark(body) is body
    assert without_mark(bytearray(b"\xef\xbb\xbf[1]")) == body
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


def test_nulls_in_a_tensor_of_numbers_are_refused_by_its_name() -> None:
    # What KServe's client writes for NaN.
    tensor = {"name": "scale", "shape": [2], "datatype": "FP32", "data": [1.0, None]}
    body = asked(tensor)
    with pytest.raises(ValueError, match="scale holds values that are not float32"):
        decode(body, JSON, {}, [SCALE], {})
