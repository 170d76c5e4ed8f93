"""Folders of Hugging Face's datasets and Parquet files are data, where `datasets` is installed."""

from pathlib import Path

import numpy as np
import pytest

import compress
from compress.common.errors import PipelineInvalid
from compress.pipelines.data.describe import describe_files

datasets = pytest.importorskip("datasets")


def test_a_saved_folder_gives_images_and_names_of_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = [np.full((6, 6, 3), 10 * i, np.uint8) for i in range(20)]
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["dog", "ape"])
    )
    columns = {"image": pixels, "label": [i % 2 for i in range(20)]}
    saved = datasets.Dataset.from_dict(columns, features=features)
    saved.train_test_split(0.25, shuffle=False).save_to_disk("saved")
    assert describe_files(Path("saved")) == {
        "huggingface": "saved",
        "image": "image",
        "label": "label",
    }

    splits = compress.load_data(huggingface="saved", image="image", prepare={"size": 3})
    (batch,) = splits.batches("test")
    assert batch.target.tolist() == [1, 0, 1, 0, 1]
    assert np.allclose(batch.inputs[0][:, 0, 0, 0], np.arange(150, 200, 10) / 255)
    assert splits.datasets["test"].class_names == ("dog", "ape")  # type: ignore[attr-defined]


def test_a_parquet_file_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"size": [50.0, 80.0, 20.0], "price": [1.5, 2.5, 0.5]}
    datasets.Dataset.from_dict(rows).to_parquet("train.parquet")
    splits = compress.load_data(table=".", label="price")
    (batch,) = splits.batches("train")
    assert batch.inputs[0].tolist() == [[50.0], [80.0], [20.0]]
    assert batch.target.tolist() == [1.5, 2.5, 0.5]


def test_a_parquet_file_names_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    features = datasets.Features(
        size=datasets.Value("float32"), label=datasets.ClassLabel(names=["mid", "low", "high"])
    )
    rows = {"size": [1.0, 2.0, 3.0, 4.0], "label": [1, 2, 1, 2]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet("train.parquet")
    assert "classes" not in describe_files(Path("train.parquet"))
    splits = compress.load_data(table=".", label="label")
    assert next(iter(splits.batches("train"))).target.tolist() == [1, 2, 1, 2]
    assert splits.datasets["train"].class_names == ("mid", "low", "high")  # type: ignore[attr-defined]


def test_columns_are_inputs_by_their_names_and_minus_one_is_no_label(tmp_path: Path) -> None:
    features = datasets.Features(
        a=datasets.Value("float32"),
        b=datasets.Value("float32"),
        label=datasets.ClassLabel(names=["bad", "good"]),
    )
    parts = {
        name: datasets.Dataset.from_dict(
            {"a": [1.0, 2.0], "b": [3.0, 4.0], "label": labels}, features=features
        )
        for name, labels in (("train", [0, 1]), ("unsupervised", [-1, -1]))
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    splits = compress.load_data(huggingface=tmp_path / "saved", columns=["b", "a"])
    read = {name: next(iter(splits.batches(name))) for name in ("train", "unlabelled")}
    for batch in read.values():
        assert [x.tolist() for x in batch.inputs] == [[3, 4], [1, 2]]
    assert read["train"].target.tolist() == [0, 1] and read["unlabelled"].target is None


def test_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    pixels = np.zeros((6, 6, 3), np.uint8)
    features = datasets.Features(image=datasets.Image())
    saved = datasets.Dataset.from_dict({"image": [pixels, None]}, features=features)
    datasets.DatasetDict(train=saved, val=saved).save_to_disk(str(tmp_path / "saved"))
    splits = compress.load_data(huggingface=tmp_path / "saved", image="image", prepare={"size": 3})
    with pytest.raises(PipelineInvalid, match="sample 1 is no image that can be read"):
        splits.contents()
