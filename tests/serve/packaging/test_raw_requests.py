"""Images and texts that `val` holds, sent as a client would, become its samples, or it is said."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import ConcatDataset, Dataset, Subset

from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.raw_samples import raw_columns
from compress.data.splits import Splits
from compress.serve.packaging.request_forms import ImageInput, TextInput
from compress.serve.packaging.val_preparation import Preparation, compare_preparation
from compress.serve.torchserve.stage import PackageTorchServe

COUNT, SIDE = 6, 8
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
IMAGES = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3, SIDE, SIDE)),))


def pictures() -> list[Image.Image]:
    """Return pictures of 20 × 12 pixels, each brighter towards another corner, with grain."""
    generator, drawn = np.random.default_rng(0), []
    for i in range(COUNT):
        slope = np.add.outer(np.linspace(0, 1, 12), np.linspace(0, 1, 20)) / 2
        pixels = np.rot90(slope, 2 * i)[..., None] * [200, 150, 60 + 20 * i]
        grain = generator.uniform(0, 50, (12, 20, 3))
        drawn.append(Image.fromarray((pixels + grain).astype(np.uint8)))
    return drawn


def transformed(image: Image.Image, resample: Any = Image.Resampling.BILINEAR) -> torch.Tensor:
    """Return what torchvision's Resize((8, 8)), ToTensor and Normalize make of an image."""
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), resample))
    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255)
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


class Files(Dataset[Any]):
    """Images in a folder, as torchvision's ImageFolder holds them: `samples` of paths."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.root, self.how, self.samples = str(folder), how, []
        for i, picture in enumerate(pictures()):
            picture.save(folder / f"{i}.png")
            self.samples.append((str(folder / f"{i}.png"), i % 3))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        with Image.open(path) as image:
            return transformed(image, **self.how), label


class Named(Files):
    """As PyTorch's tutorial: names in a table, and the folder of the images."""

    def __init__(self, folder: Path, **how: Any) -> None:
        super().__init__(folder, **how)
        with (folder / "labels.csv").open("w") as file:
            csv.writer(file).writerows((Path(path).name, y) for path, y in self.samples)
        with (folder / "labels.csv").open() as file:
            self.rows = [[name, int(label)] for name, label in csv.reader(file)]
        self.samples = []

    def __getitem__(self, index: int) -> Any:
        name, label = self.rows[index]
        with Image.open(Path(self.root) / name) as image:
            return transformed(image, **self.how), label


class Arrays(Dataset[Any]):
    """Images in memory, as torchvision's CIFAR10 holds them: `data` of bytes."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.data, self.how = np.stack([np.asarray(p) for p in pictures()]), how
        self.targets, self.seen = list(range(COUNT)), np.arange(COUNT)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return transformed(Image.fromarray(self.data[index]), **self.how), self.targets[index]


class Columns(Dataset[Any]):
    """A table of which a format shows some columns, as Hugging Face's datasets have it."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.table = [{"image": p, "x": transformed(p, **how), "labels": 1} for p in pictures()]
        self.column_names, self.format = ["image", "x", "labels"], ["x", "labels"]

    def with_format(self, format: None) -> list[dict[str, Any]]:
        return self.table

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return {name: self.table[index][name] for name in self.format}


class Wrapped(Dataset[Any]):
    """A user's own wrapper of a subset."""

    def __init__(self, dataset: Any) -> None:
        self.subset = Subset(dataset, [4, 1, 3])

    def __len__(self) -> int:
        return len(self.subset)

    def __getitem__(self, index: int) -> Any:
        return self.subset[index]


def wrapped(folder: Path, **how: Any) -> Dataset[Any]:
    return Wrapped(Files(folder, **how))


def joined(folder: Path, **how: Any) -> Dataset[Any]:
    return ConcatDataset([Files(folder, **how), Wrapped(Files(folder, **how)).subset])


HOLDERS = {Files: "samples.0", Named: "rows.0", Arrays: "data", Columns: "image"}
HOLDERS |= {wrapped: "subset.samples.0", joined: "samples.0"}


def compared(dataset: Any, **settings: Any) -> Preparation:
    forms = {"image": ImageInput(**{"mean": MEAN, "std": STD, **settings})}
    (found,) = compare_preparation(forms, IMAGES, Splits({"val": dataset}))
    return found


@pytest.mark.parametrize("holder", HOLDERS)
def test_images_that_val_holds_are_found_and_become_its_samples(
    holder: Callable[..., Any], tmp_path: Path
) -> None:
    dataset = holder(tmp_path)
    found = compared(dataset)
    assert (found.column, found.samples) == (HOLDERS[holder], len(dataset))
    assert not found.difference and not found.is_wrong


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_small_difference_is_named_where_ranges_show_nothing(
    holder: Callable[..., Any], tmp_path: Path
) -> None:
    dataset = holder(tmp_path, resample=Image.Resampling.BICUBIC)
    found = compared(dataset)
    assert f"{len(dataset)} of {len(dataset)} images of `val` ({found.column})" in found.difference
    assert "grey levels on average" in found.difference and not found.is_wrong


@pytest.mark.parametrize(
    ("settings", "is_wrong"),
    [({"mean": (0.2,)}, True), ({"std": (0.5,)}, True), ({"shorter_side": 8}, False)],
    ids=["mean", "std", "part of a smooth image"],
)
def test_images_that_become_other_inputs_are_named(
    tmp_path: Path, settings: Any, is_wrong: bool
) -> None:
    found = compared(Files(tmp_path), **settings)
    assert found.difference and found.is_wrong is is_wrong


def test_one_image_that_is_turned_is_named(tmp_path: Path) -> None:
    dataset = Files(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: upside down, which torchvision's loader ignores
    path, _ = dataset.samples[2]
    with Image.open(path) as image:
        image.load()
        image.save(path, exif=exif)
    found = compared(dataset)
    assert f"1 of {COUNT} images" in found.difference and "(sample 2 at c " in found.difference


def test_bytes_are_compared_without_a_tolerance(tmp_path: Path) -> None:
    class Bytes(Arrays):
        off = 0

        def __getitem__(self, index: int) -> Any:
            image = Image.fromarray(self.data[index])
            x = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).copy()
            x[3, 2, 1] ^= self.off
            return torch.from_numpy(x), 1

    spec = TensorSpec(name="x", shape=("batch", SIDE, SIDE, 3), dtype="uint8")
    forms = {"image": ImageInput(layout="hwc", resample="bicubic")}
    dataset = Bytes(tmp_path)
    for off, words in ((0, ""), (1, "by 0.00521 of 255 grey levels on average and 1 at most")):
        dataset.off = off
        (found,) = compare_preparation(forms, Signature(inputs=(spec,)), Splits({"val": dataset}))
        assert found.column == "data"
        assert words in found.difference and bool(found.difference) == bool(off)


def test_other_pictures_of_a_dataset_are_not_taken_for_its_samples(tmp_path: Path) -> None:
    class Heatmaps(Arrays):
        def __getitem__(self, index: int) -> Any:
            generator = torch.Generator().manual_seed(index)
            return torch.rand(3, SIDE, SIDE, generator=generator), 1

    found = compared(Heatmaps(tmp_path), mean=(0.0,), std=(1.0,))
    assert (found.column, found.difference) == ("", "")


def test_images_of_several_sizes_are_compared_by_their_range(tmp_path: Path) -> None:
    class Sizes(Arrays):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0][:, : SIDE - index % 2], 1

    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3, "h", SIDE)),))
    forms = {"image": ImageInput(mean=MEAN, std=STD, size=(SIDE, SIDE))}
    data = Splits({"val": Sizes(tmp_path)}, batch_size=1)
    (found,) = compare_preparation(forms, signature, data)
    assert (found.column, found.samples) == ("", COUNT)


def test_what_a_dataset_holds_may_fail_to_be_read(tmp_path: Path) -> None:
    class Odd(Arrays):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder)
            self.again = self
            self.holder = type("Holder", (), {"__len__": lambda self: 1 / 0})()

    assert raw_columns(Odd(tmp_path), [0, 1]) == {}


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijkl", "q"]
TEXTS = ["a b c", "d e f g h", "c b", "l k j i", "a a a d e f", "h g f e d c b a"]
LONGEST = 8


def saved_tokenizer(folder: Path) -> Path:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(WORDS[:4])
    backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


class Texts(Dataset[Any]):
    """Texts that are tokenized as they are read."""

    def __init__(self, tokenizer: Path, length: int | None = None, **how: Any) -> None:
        self.texts, self.names = TEXTS, ["good", "bad"] * 3
        self.length, self.how = length, how
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.tokenizer.enable_truncation(how.pop("longest", LONGEST))
        self.before = how.pop("before", "")
        if length:
            self.tokenizer.enable_padding(length=length, direction=how.pop("direction", "right"))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        found = self.tokenizer.encode(self.before + self.texts[index], **self.how)
        return {"input_ids": found.ids, "attention_mask": found.attention_mask, "labels": 1}


def compared_texts(tokenizer: Path, dataset: Texts) -> Preparation:
    axes = ("batch", dataset.length or "length")
    names = ("input_ids", "attention_mask")
    specs = tuple(TensorSpec(name=name, shape=axes, dtype="int64") for name in names)
    forms = {"text": TextInput(tokenizer=str(tokenizer), max_length=LONGEST)}
    (found,) = compare_preparation(forms, Signature(inputs=specs), Splits({"val": dataset}))
    assert not found.is_wrong
    return found


@pytest.mark.parametrize("length", [None, 10])
def test_texts_that_val_holds_become_its_samples(tmp_path: Path, length: int | None) -> None:
    tokenizer = saved_tokenizer(tmp_path)
    found = compared_texts(tokenizer, Texts(tokenizer, length))
    assert (found.column, found.samples, found.difference) == ("texts", 6, "")


@pytest.mark.parametrize(
    ("length", "how", "count"),
    [
        (None, {"add_special_tokens": False}, 6),
        (None, {"longest": 5}, 4),
        (None, {"before": "q "}, 6),
        (10, {"direction": "left"}, 6),
    ],
    ids=["no special tokens", "cut shorter", "with a prefix", "padded left"],
)
def test_texts_that_become_other_tokens_are_named(
    tmp_path: Path, length: int | None, how: dict[str, Any], count: int
) -> None:
    tokenizer = saved_tokenizer(tmp_path)
    found = compared_texts(tokenizer, Texts(tokenizer, length, **how))
    assert f"{count} of 6 texts of `val` (texts), sent by a client," in found.difference


def test_packaging_says_what_it_found(tmp_path: Path) -> None:
    from compress import EagerModel

    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    model = EagerModel.from_module(module, signature=IMAGES)
    data = Splits({"val": Files(tmp_path)})
    stage = PackageTorchServe(image=ImageInput(mean=MEAN, std=(0.9,)))
    with pytest.raises(StageFailed, match=r"6 of 6 images of `val` \(samples\.0\), sent by a cli"):
        stage.run(model, Context(root=tmp_path / "wrong", data=data))
    assert not (tmp_path / "wrong").exists()
    stage = PackageTorchServe(image=ImageInput(mean=MEAN, std=STD, resample="bicubic"))
    packed = stage.run(model, Context(root=tmp_path / "mar", data=data))
    assert "grey levels on average" in json.dumps(packed.manifest.facts["warnings"])
