"""Images, tables and arrays are data without code: splits, labels, preparation, what travels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from onnx import helper
from PIL import Image

import compress
from compress.common.errors import PipelineInvalid
from compress.common.signature import Signature
from compress.pipelines.api import Pipeline
from compress.pipelines.commands.init import InitOptions, _data_section
from compress.pipelines.config.pipeline import PipelineConfig, relocated
from compress.pipelines.data import records, samples
from compress.pipelines.data.describe import describe_files
from compress.pipelines.data.records import Records, divide
from compress.pipelines.data.samples import targets_of
from compress.pipelines.runner.inputs import load_data
from compress.pipelines.runner.source_model import import_source
from compress.serve.packaging.request_forms import ImageInput, forms_of
from compress.serve.packaging.val_preparation import image_body
from tests.serve.served_here import serving

NET = """
from torch import nn


def convolutions(channels=3, classes=2):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, classes),
    )


def linear(features=2, outputs=1):
    return nn.Linear(features, outputs)
"""
PREPARE = {"size": 8, "mean": [0.5], "std": [0.25]}


def write(folder: Path, data: dict[str, Any], **model: Any) -> PipelineConfig:
    """Write a pipeline with these data, and read it."""
    (folder / "net.py").write_text(NET)
    section = model or {"factory": "net:convolutions"}
    content = {"version": 1, "model": section, "data": data, "stages": [{"stage": "export_onnx"}]}
    (folder / "p.yaml").write_text(yaml.safe_dump(content))
    return PipelineConfig.from_yaml(folder / "p.yaml")


def images(folder: Path, names: list[str], size: tuple[int, int] = (12, 10)) -> None:
    """Write images whose pixels follow from their number."""
    for number, name in enumerate(names):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(number)
        Image.fromarray(generator.integers(0, 256, (*size, 3), np.uint8)).save(file)


def test_folders_of_classes_become_prepared_samples(tmp_path: Path) -> None:
    names = [
        f"{split}/{label}/{i}.png"
        for split in ("train", "validation")
        for label in ("cat", "ape")
        for i in range(3)
    ]
    images(tmp_path / "photos", names)
    (tmp_path / "photos/train/.hidden.png").write_bytes(b"")
    (tmp_path / "photos/train/loop").symlink_to("..")
    data = load_data(write(tmp_path, {"images": "photos", "prepare": PREPARE}))
    assert data is not None and sorted(data.datasets) == ["train", "val"]
    (batch,) = data.batches("val")
    assert batch.inputs[0].shape == (6, 3, 8, 8) and batch.target.tolist() == [0, 0, 0, 1, 1, 1]
    pixels = Image.open(tmp_path / "photos/validation/ape/0.png").resize(
        (8, 8), Image.Resampling.BILINEAR
    )
    expected = (np.asarray(pixels, np.float32) / 255 - 0.5) / 0.25
    assert np.allclose(batch.inputs[0][0].permute(1, 2, 0), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "data", "words"),
    [
        (["a/1.png", "b/2.png"], {}, "is not divided into train, val and test; say how many"),
        (
            ["a/1.png", "2.png"],
            {"split": {"val": 0.5}},
            "photos/2.png lies in no folder of",
        ),
        (
            ["train/a/1.png", "b/1.png"],
            {},
            "besides train, there are samples",
        ),
        (
            ["train/a/1.png"],
            {"split": {"val": 0.5}},
            "is divided into train; leave `split` out",
        ),
        ([], {}, "photos holds no images (.bmp, .gif"),
        (["a/1.png"], {"split": {"val": 0.3}}, "split: val gets none of 1 samples"),
    ],
)
def test_folders_that_are_not_clear_are_refused(
    tmp_path: Path, names: list[str], data: dict[str, Any], words: str
) -> None:
    (tmp_path / "photos").mkdir()
    images(tmp_path / "photos", names)
    with pytest.raises(PipelineInvalid) as caught:
        load_data(write(tmp_path, {"images": "photos", "prepare": PREPARE, **data}))
    assert words in str(caught.value) and "p.yaml:" in str(caught.value)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    images(tmp_path / "photos", ["train/a/1.png", "train/b/2.png"])
    (tmp_path / "photos/train/b/2.png").write_bytes(b"no image")
    data = load_data(write(tmp_path, {"images": "photos", "prepare": PREPARE}))
    assert data is not None
    with pytest.raises(PipelineInvalid, match=r"data.images.*photos/train/b/2.png is no image"):
        data.contents()


def test_shares_are_the_same_each_time_and_of_each_class() -> None:
    labels = ["a"] * 60 + ["b"] * 30 + ["c"] * 10
    records = Records({"x": np.arange(100)}, labels)
    parts, again = (divide(records, {"val": 0.2, "test": 0.1}) for _ in range(2))
    every = np.concatenate([part.columns["x"] for part in parts.values()])
    assert sorted(every.tolist()) == list(range(100))
    for name, shares in (("val", (12, 6, 2)), ("test", (6, 3, 1)), ("train", (42, 21, 7))):
        assert tuple(map(parts[name].labels.count, "abc")) == shares
        assert np.array_equal(parts[name].columns["x"], again[name].columns["x"])
    # Of many small classes, some have nobody in `val`, but the share holds.
    small = Records({"x": np.arange(90)}, [i // 3 for i in range(90)])
    assert len(divide(small, {"val": 0.2})["val"]) == 18


@pytest.mark.parametrize(
    ("labels", "known", "expected", "names"),
    [
        (["dog", "ape", "dog"], (), [1, 0, 1], ("ape", "dog")),
        (["dog", "ape"], ("dog", "cat", "ape"), [0, 2], ("dog", "cat", "ape")),
        (["3", "0", "7"], (), [3, 0, 7], ()),
        (["1", "2", "3"], (), [1, 2, 3], ()),
        (["1", "2", "3"], ("1", "2", "3"), [0, 1, 2], ("1", "2", "3")),
        ([10, 30], ("10", "20", "30"), [0, 2], ("10", "20", "30")),
        (["0.5", "2"], (), [0.5, 2.0], ()),
        (np.array([[0.0, 1.0]]), (), [[0.0, 1.0]], ()),
    ],
)
def test_labels_become_classes_or_numbers(
    labels: Any, known: tuple[str, ...], expected: list[Any], names: tuple[str, ...]
) -> None:
    targets, found = targets_of({"train": Records({"x": labels}, labels)}, known)
    assert targets["train"] is not None
    assert (targets["train"].tolist(), found) == (expected, names)


def test_labels_that_the_model_does_not_know_are_refused() -> None:
    with pytest.raises(
        PipelineInvalid, match="found 'bird', and the model's classes are 'ape', 'cat'"
    ):
        targets_of({"train": Records({"x": [1]}, ["bird"])}, ("ape", "cat"))


def test_tables_give_numbers_and_say_what_a_row_lacks(tmp_path: Path) -> None:
    (tmp_path / "house").mkdir()
    (tmp_path / "house/train.csv").write_text("size,rooms,price\n50,2,1.5\n80,3,2.5\n")
    (tmp_path / "house/val.jsonl").write_text('{"size": 60, "rooms": 1, "price": 1.75}\n')
    table = {"table": "house", "columns": ["rooms", "size"], "label": "price"}
    data = load_data(write(tmp_path, table, factory="net:linear"))
    assert data is not None
    (batch,) = data.batches("train")
    assert batch.inputs[0].tolist() == [[2.0, 50.0], [3.0, 80.0]]
    assert batch.target.dtype == torch.float32 and batch.target.tolist() == [1.5, 2.5]
    (tmp_path / "house/train.csv").write_text("size,rooms,price\n50,,1.5\n")
    assert targets_of({"train": Records({"x": [1]}, ["3"])}, (), True)[0]["train"].tolist() == [3.0]
    with pytest.raises(PipelineInvalid, match=r"train.csv: row 1 has no value in column 'rooms'"):
        load_data(write(tmp_path, table, factory="net:linear"))
    (tmp_path / "house/train.csv").write_text("size,rooms,price\n50,many,1.5\n")
    with pytest.raises(PipelineInvalid, match="column 'rooms': could not convert string to float"):
        load_data(write(tmp_path, table, factory="net:linear"))


def splits_of(folder: Path, data: dict[str, Any], **model: Any) -> Any:
    """Read data of files, without a model that says more than its inputs."""
    found = load_data(write(folder, data, factory="net:linear", **model))
    assert found is not None
    return found


def test_splits_have_the_same_columns_in_the_same_order(tmp_path: Path) -> None:
    (tmp_path / "house").mkdir()
    (tmp_path / "house/train.csv").write_text("size,rooms,price\n50,2,1.5\n")
    (tmp_path / "house/val.csv").write_text("rooms,price,size\n2,2,50\n")
    (tmp_path / "house/unlabelled.csv").write_text("size,rooms\n50,2\n")
    table = {"table": "house", "label": "price"}
    data = splits_of(tmp_path, table)
    read = {name: next(iter(data.batches(name))) for name in data.datasets}
    assert all(batch.inputs[0].tolist() == [[50, 2]] for batch in read.values())
    # A whole price is a price, as 1.5 is.
    assert read["val"].target.tolist() == [2.0] and read["unlabelled"].target is None
    (tmp_path / "house/val.csv").write_text("rooms,price,size,id\n2,2,50,7\n")
    with pytest.raises(PipelineInvalid, match="inputs of val are 'rooms', 'size', 'id', and of"):
        splits_of(tmp_path, table)


def test_labels_are_read_alike_in_all_splits() -> None:
    parts = {"train": Records({"x": [1, 2]}, ["01", "a"]), "val": Records({"x": [1]}, ["01"])}
    targets, names = targets_of(parts)
    assert names == ("01", "a") and targets["val"] is not None and targets["val"].tolist() == [0]
    for labels in (np.array([1, 0], np.uint8), [True, False]):
        (found, _) = targets_of({"train": Records({"x": [1, 2]}, labels)})
        assert found["train"] is not None and found["train"].dtype == torch.int64
    with pytest.raises(PipelineInvalid, match="found nan or inf"):
        targets_of({"train": Records({"x": [1, 2]}, ["nan", "1"])})
    with pytest.raises(PipelineInvalid, match="-1, which names no class"):
        targets_of({"train": Records({"x": [1, 2]}, [-1, 1], ("bad", "good"))})


def test_arrays_are_inputs_by_their_names(tmp_path: Path) -> None:
    a, b, y = np.zeros((2, 1)), np.ones((2, 1)), np.array([0, 1])
    arrays = {"a_train": a, "b_train": b, "Y_train": y, "Y_val": y, "b_val": b, "a_val": a}
    np.savez(tmp_path / "two.npz", **arrays)
    inputs = [{"name": name, "shape": ["batch", 1]} for name in "ba"]
    data = splits_of(tmp_path, {"arrays": "two.npz"}, inputs=inputs)
    for name in ("train", "val"):
        (batch,) = data.batches(name)
        assert [x.flatten().tolist() for x in batch.inputs] == [[1, 1], [0, 0]]
        assert batch.target.tolist() == [0, 1]
    np.savez(tmp_path / "two.npz", a_train=a, b=b)
    with pytest.raises(PipelineInvalid, match="besides train, there are samples that belong to no"):
        splits_of(tmp_path, {"arrays": "two.npz"}, inputs=inputs)
    np.savez(tmp_path / "two.npz", a_train=a, b_train=b, a_val=a, b_val=b)
    (batch,) = splits_of(tmp_path, {"arrays": "two.npz"}, inputs=inputs).batches("val")
    assert batch.target is None and len(batch.inputs) == 2
    np.savez(tmp_path / "two.npz", a_train=a, b_train=b, lable_train=y)
    with pytest.raises(PipelineInvalid, match="'lable' nearly is: rename it, or give label: lable"):
        splits_of(tmp_path, {"arrays": "two.npz"}, inputs=inputs)


def test_tables_of_other_programs_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x;y\n1;0\n2;1\n")
    (tmp_path / "t.jsonl").write_text('\ufeff{"x": 1, "y": "a\u2028b"}\n{"x": 2, "y": "c"}\n')
    for name in ("t.csv", "t.jsonl"):
        table = {"table": name, "label": "y", "split": {"val": 0.5}}
        assert len(splits_of(tmp_path, table).datasets["val"]) == 1


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ("x,y\n1,0,3\n", {}, "row 1 has more cells than columns"),
        ("x,y\n1,0\nnan,1\n", {}, "row 2, column 'x': 'nan' is no number"),
        ("x,y\n1,0\n", {"columns": ["x", "y"]}, "column 'y' is given twice"),
        ("x,y\n1,0\n", {"prepare": {"tokenizer": "t.json"}}, "only texts are prepared"),
    ],
)
def test_tables_that_are_not_clear_are_refused(
    tmp_path: Path, rows: str, settings: dict[str, Any], words: str
) -> None:
    (tmp_path / "t.csv").write_text(rows)
    with pytest.raises(PipelineInvalid, match=words):
        splits_of(tmp_path, {"table": "t.csv", "label": "y", "split": {"val": 0.5}, **settings})


@pytest.mark.parametrize("kind", ["MPO", "JPEG", "WEBP"])
def test_photos_are_turned_as_their_cameras_were_held(tmp_path: Path, kind: str) -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255
    photo = Image.fromarray(pixels)
    exif = photo.getexif()
    exif[0x0112] = 6  # to be turned to the right
    for split in ("train", "val"):
        (tmp_path / "photos" / split).mkdir(parents=True)
        more = {"save_all": True, "append_images": [photo]} if kind == "MPO" else {}
        suffix = "webp" if kind == "WEBP" else "jpg"
        file = tmp_path / f"photos/{split}/1.{suffix}"
        photo.save(file, kind, exif=exif.tobytes(), **more)
    data = load_data(write(tmp_path, {"images": "photos", "prepare": {"size": 16}}))
    assert data is not None
    (batch,) = data.batches("val")
    assert batch.inputs[0][0, 0, :, 12:].min() > 0.9 and batch.inputs[0][0, 0, :, :4].max() < 0.1


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_val", "y_val"),
        ("train_images", "train_labels", "val_images", "val_labels"),
    ],
)
def test_names_of_arrays_tell_the_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    pixels, labels = np.full((4, 6, 6), 255, np.uint8), np.array([[0], [1], [2], [3]])
    arrays = (pixels, labels, pixels[:2] // 5, labels[:2])
    np.savez(tmp_path / "data.npz", **dict(zip(names, arrays, strict=True)))
    data = {"arrays": "data.npz", "prepare": {"size": 4}}
    inputs = [{"name": "x", "shape": ["batch", 1, 4, 4]}]
    found = load_data(write(tmp_path, data, factory="net:convolutions", inputs=inputs))
    assert found is not None
    (batch,) = found.batches("val")
    assert batch.inputs[0].shape == (2, 1, 4, 4) and batch.target.tolist() == [0, 1]
    assert torch.allclose(batch.inputs[0], torch.tensor(0.2))


def test_a_misspelt_key_is_named_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(PipelineInvalid, match="unknown key; did you mean 'images'"):
        write(tmp_path, {"imges": "photos"})
    with pytest.raises(PipelineInvalid, match="give one of text and columns"):
        write(tmp_path, {"table": "t.csv", "text": "a", "columns": ["b"]})


def test_paths_follow_a_file_that_is_written_elsewhere(tmp_path: Path) -> None:
    data = {"table": "t.csv", "text": "a", "prepare": {"tokenizer": "tokenizer.json"}}
    moved = relocated({"model": {}, "data": data}, tmp_path, tmp_path / "runs")["data"]
    assert moved == {**data, "table": "../t.csv", "prepare": {"tokenizer": "../tokenizer.json"}}
    own = {"factory": "data:splits"}
    assert relocated({"model": {}, "data": own}, tmp_path, tmp_path / "runs")["data"] == own


@pytest.mark.parametrize(
    "prepare",
    [
        {"size": [8, 6], "mean": [0.1, 0.2, 0.3], "std": [0.5]},
        {"size": 8, "shorter_side": 9, "resample": "bicubic", "layout": "hwc"},
        {"size": 8, "squashed_to": [10, 12], "crop_rounding": "down"},
    ],
)
def test_the_preparation_travels_with_the_model(tmp_path: Path, prepare: dict[str, Any]) -> None:
    images(tmp_path / "photos", ["train/a/1.png", "train/b/2.png", "val/a/1.png"])
    channels_last = prepare.get("layout") == "hwc"
    shape = ["batch", 8, 8, 3] if channels_last else ["batch", 3, "height", "width"]
    inputs = [{"name": "x", "shape": shape}]
    arguments = {"channels": 8 if channels_last else 3}
    data = {"images": "photos", "prepare": prepare}
    model = {"factory": "net:convolutions", "inputs": inputs, "arguments": arguments}
    pipeline = write(tmp_path, data, **model)
    source = import_source(pipeline, tmp_path / "source", load_data(pipeline))
    forms = forms_of(source)
    given = ImageInput.model_validate(prepare)
    signature = Signature(inputs=pipeline.model.inputs or ())
    assert source.class_names == ("a", "b")
    found, expected = (form.handler_settings(signature) for form in (forms["image"], given))
    assert {n: v for n, v in found.items() if n != "mean" and n != "std"} == {
        n: v for n, v in expected.items() if n != "mean" and n != "std"
    }
    for name in ("mean", "std"):
        assert np.allclose(found[name], expected[name])


def test_python_has_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "rows.npz", x=np.arange(20.0).reshape(10, 2), y=np.arange(10) % 2)
    monkeypatch.chdir(tmp_path)
    splits = compress.load_data(arrays=Path("rows.npz"), split={"val": 0.4})
    assert len(splits.datasets["val"]) == 4  # type: ignore[arg-type]
    module = torch.nn.Linear(2, 2)
    assert isinstance(compress.quantize_dynamic(module, data=splits), compress.GraphModel)
    with pytest.raises(PipelineInvalid, match=r"data.arays: unknown key; did you mean 'arrays'"):
        compress.load_data(arays="rows.npz")


def test_init_describes_what_it_is_given(tmp_path: Path) -> None:
    images(tmp_path / "photos", ["a/1.png", "b/2.png"])
    (tmp_path / "reviews.csv").write_text(
        "id,title,review,stars\n1,So,It is so so,1\n2,Hm,Good enough,2\n"
    )
    (tmp_path / "house.csv").write_text("size,rooms,price\n50,2,1.5\n")
    np.save(tmp_path / "train.npy", np.zeros((2, 3)))
    split = {"split": {"val": 0.2, "test": 0.1}}
    found = {
        name: describe_files(tmp_path / name) for name in ("photos", "reviews.csv", "house.csv")
    }
    assert found["photos"] == {"images": str(tmp_path / "photos"), **split}
    assert found["reviews.csv"] == {
        "table": str(tmp_path / "reviews.csv"),
        "text": "review",
        "label": "stars",
        "classes": ["1", "2"],
        **split,
    }
    assert found["house.csv"] == {"table": str(tmp_path / "house.csv"), "label": "price", **split}
    with pytest.raises(PipelineInvalid, match=r"expected a folder of images or sounds, a \.csv"):
        (tmp_path / "notes.txt").write_text("")
        describe_files(tmp_path / "notes.txt")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (["batch", 3, 8, 6], {"size": [8, 6], "mean": [0.0], "std": [1.0]}),
        (["batch", 8, 6, 1], {"size": [8, 6], "layout": "hwc", "mean": [0.0], "std": [1.0]}),
        (["batch", 3, "height", "width"], None),
        ([], None),
    ],
)
def test_init_prepares_images_as_the_input_is(
    tmp_path: Path, shape: list[Any], expected: dict[str, Any] | None
) -> None:
    images(tmp_path / "photos", ["a/1.png", "b/2.png"])
    options = InitOptions("net:net", data=str(tmp_path / "photos"))
    model = {"inputs": [{"name": "x", "shape": shape}]} if shape else {}
    if expected is None:
        with pytest.raises(PipelineInvalid, match="images become inputs of one size; give it as"):
            _data_section(options, tmp_path, model)
    else:
        assert _data_section(options, tmp_path, model)["prepare"] == expected


def test_an_onnx_file_names_its_classes(tmp_path: Path) -> None:
    images(tmp_path / "photos", ["ape/1.png", "ape/2.png", "zebra/1.png", "zebra/2.png"])
    value = {n: helper.make_tensor_value_info(n, 1, ["batch", 3, 8, 8]) for n in "xy"}
    node = helper.make_node("Relu", ["x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [value["x"]], [value["y"]]))
    helper.set_model_props(model, {"class_names": '["zebra", "ape"]'})
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    data = {"images": "photos", "split": {"val": 0.5}, "prepare": {"mean": [0.5]}}
    found = load_data(write(tmp_path, data, file="m.onnx"))
    assert found is not None
    (batch,) = found.batches("val")
    assert batch.target.tolist() == [1, 0]


def test_a_text_file_names_the_classes(tmp_path: Path) -> None:
    images(tmp_path / "photos", ["train/ape/1.png", "val/ape/1.png", "val/zebra/1.png"])
    data = {"images": "photos", "prepare": PREPARE, "classes": "names.txt"}
    with pytest.raises(PipelineInvalid, match=r"data.images: classes: .*No such file.*names.txt"):
        load_data(write(tmp_path, data))
    made = []
    for names, targets in {"\ufeffzebra\n\n ape\n": [1, 0], "ape\nzebra": [0, 1]}.items():
        (tmp_path / "names.txt").write_text(names)
        found = load_data(write(tmp_path, data))
        assert found is not None
        (batch,) = found.batches("val")
        assert batch.target.tolist() == targets
        made.append(found.contents().made)
    assert made[0] != made[1]
    (tmp_path / "names.txt").write_text("\n")
    with pytest.raises(PipelineInvalid, match=r"classes: names\.txt is empty"):
        load_data(write(tmp_path, data))
    (tmp_path / "names.txt").write_text("ape\nzebra\nape\n")
    with pytest.raises(PipelineInvalid, match=r"classes: names\.txt: label 'ape' is given twice"):
        load_data(write(tmp_path, data))
    with pytest.raises(PipelineInvalid, match=r"classes: label 'ape' is given twice"):
        write(tmp_path, data | {"classes": ["ape", "ape"]})


def test_words_are_no_labels_of_a_regression(tmp_path: Path) -> None:
    images(tmp_path / "photos", ["train/ape/1.png", "val/ape/1.png"])
    pipeline = write(tmp_path, {"images": "photos", "prepare": PREPARE})
    wrong = pipeline.model_copy(update={"task": "regression"})
    with pytest.raises(PipelineInvalid, match="labels: found 'ape', expected numbers"):
        load_data(wrong)
    assert load_data(pipeline.model_copy(update={"task": "embedding"})) is not None


def test_the_cache_key_names_what_changed_and_stays_where_a_file_moves(tmp_path: Path) -> None:
    images(tmp_path / "photos", ["train/a/1.png", "val/a/2.png"])

    def key(**settings: Any) -> Any:
        found = load_data(write(tmp_path, {"images": "photos", "prepare": PREPARE, **settings}))
        assert found is not None
        return found.contents().made

    made = key()
    files = made["arguments"]["files"]
    assert files["images"] == "photos" and files["prepare"]["mean"] == [0.5]
    assert key(loader={"workers": 1}) == made
    assert key(batch_size=3) == {**made, "batch_size": 3}
    assert key(prepare={**PREPARE, "std": [0.5]}) != made and key(classes=["a", "b"]) != made
    content = yaml.safe_load((tmp_path / "p.yaml").read_text())
    (tmp_path / "names.txt").write_text("a")
    content["data"] = {"images": "photos", "prepare": PREPARE, "classes": "names.txt"}
    made = key(classes="names.txt")
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere/p.yaml"
    moved.write_text(yaml.safe_dump(relocated(content, tmp_path, moved.parent)))
    found = load_data(PipelineConfig.from_yaml(moved))
    assert found is not None and found.contents().made == made


@pytest.mark.slow
def test_photos_are_served_as_they_were_judged(tmp_path: Path) -> None:
    names = [f"{label}/{i}.png" for label in ("dark", "light") for i in range(20)]
    images(tmp_path / "photos", names)
    for name in names[20:]:
        Image.new("RGB", (14, 10), (200, 220, 210)).save(tmp_path / "photos" / name)
    data = {"images": "photos", "split": {"val": 0.25}, "prepare": PREPARE}
    inputs = [{"name": "pixels", "shape": ["batch", 3, 8, 8]}]
    write(tmp_path, data, factory="net:convolutions", inputs=inputs)
    content = yaml.safe_load((tmp_path / "p.yaml").read_text())
    content["stages"] = [{"stage": "train", "epochs": 8}, {"stage": "export_onnx"}]
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(content))
    report = Pipeline.from_yaml(tmp_path / "p.yaml").run(tmp_path / "run")
    (found,) = report.stages[-1].measurements.preparation
    assert (found.form, found.column, found.difference) == ("image", "raw", "")
    with serving(tmp_path / "run/artifacts/export_onnx") as server:
        body = (tmp_path / "photos/light/3.png").read_bytes()
        status, _, answer = server.ask(body, {"Content-Type": "image/png"})
    labels = json.loads(answer)["labels"][0]
    assert status == 200 and {each["label"] for each in labels} == {"dark", "light"}


def test_a_run_of_cached_results_reads_no_photo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{split}/{kind}/{i}.png" for split in ("train", "val") for kind in "ab" for i in "01"]
    images(tmp_path / "photos", names)
    pipeline = write(tmp_path, {"images": "photos", "prepare": PREPARE})
    read: list[object] = []
    monkeypatch.setattr(samples, "image_body", lambda f: read.append(f) or image_body(f))

    def run() -> tuple[int, set[bool]]:
        read.clear()
        report = Pipeline.from_yaml(tmp_path / "p.yaml").run(tmp_path / "out")
        return len(read), {stage.cached for stage in report.stages}

    monkeypatch.setattr(records, "RACY_SECONDS", 1e9)
    assert pipeline.data and run()[0]
    assert run()[0], "files that were just written may change without a new time"
    monkeypatch.setattr(records, "RACY_SECONDS", 0.0)
    assert run()[0]
    assert run() == (0, {True})
    images(tmp_path / "photos/val", ["a/2.png"])
    assert run()[0]
