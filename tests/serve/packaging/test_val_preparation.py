"""An archive's own preparation of images and texts gives a model what `val` gave it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import TensorDataset

from compress import EagerModel
from compress.common.errors import StageFailed
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.data.splits import Splits
from compress.serve.packaging.request_forms import ImageInput, TextInput
from compress.serve.packaging.val_preparation import compare_preparation
from compress.serve.torchserve.stage import PackageTorchServe

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefgh"]


SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3, 8, 8)),))


def image_problem(samples: Splits, **settings: Any) -> str:
    """Return how images that are prepared with some settings differ from samples without files."""
    forms = {"image": ImageInput(**settings)}
    (found,) = compare_preparation(forms, SIGNATURE, samples)
    assert not found.column
    return found.difference


def val(*tensors: torch.Tensor) -> Splits:
    return Splits({"val": TensorDataset(*tensors)})


def pixels(low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return low + (high - low) * torch.rand(40, 3, 8, 8, generator=generator)


MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def scaled(images_BCHW: torch.Tensor) -> torch.Tensor:
    return (images_BCHW - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@pytest.mark.parametrize(
    ("settings", "samples"),
    [({}, pixels()), ({"mean": MEAN, "std": STD}, scaled(pixels(0.05, 0.9)))],
    ids=["from 0 to 1", "scaled"],
)
def test_samples_that_were_prepared_so_are_not_doubted(settings, samples) -> None:
    labels = torch.zeros(40, dtype=torch.long)
    assert image_problem(val(samples, labels), **settings) == ""


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"mean": (0.9,), "std": (0.05,)}, pixels()),
        ({"mean": MEAN, "std": STD}, 255 * pixels()),
        ({}, scaled(pixels())),
        ({}, pixels() / 255),
    ],
    ids=["another mean and std", "bytes", "no mean", "divided twice"],
)
def test_an_archive_that_scales_images_otherwise_is_not_packed(tmp_path, settings, samples) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    model = EagerModel.from_module(module, signature=SIGNATURE)
    stage = PackageTorchServe(image=ImageInput(**settings))
    context = Context(root=tmp_path / "mar", data=val(samples, torch.zeros(40, dtype=torch.long)))
    with pytest.raises(StageFailed, match=r"image: pixels from 0 to 1 become .*samples of `val`"):
        stage.run(model, context)
    assert not (tmp_path / "mar").exists()


def test_samples_that_cover_half_of_the_range_are_doubted() -> None:
    warning = image_problem(val(pixels()), mean=(0.5,), std=(0.5,))
    assert "become -1 to 1" in warning and "50 % of that" in warning


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[Path]:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(WORDS[:4])
    backend.save(str(tmp_path / "tokenizer.json"))
    yield tmp_path / "tokenizer.json"


@pytest.mark.parametrize("first", [2, 0], ids=["as the tokenizer's", "without special tokens"])
def test_ids_that_the_tokenizer_does_not_give_again_are_doubted(tokenizer, first) -> None:
    spec = TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64")
    signature = Signature(inputs=(spec,))
    forms = {"text": TextInput(tokenizer=str(tokenizer))}
    ids = torch.randint(4, len(WORDS), (20, 6), generator=torch.Generator().manual_seed(0))
    if first:
        ids[:, 0], ids[:, -2], ids[:, -1] = 2, 3, 0  # [CLS] … [SEP] [PAD]
    (found,) = compare_preparation(forms, signature, val(ids))
    assert bool(found.difference) == (not first)
    assert first or "16 of 16 texts of `val` (its ids, written as texts)" in found.difference
