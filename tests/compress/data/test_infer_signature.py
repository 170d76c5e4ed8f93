"""Inputs as samples show them: the batch named, what varies named, the rest fixed."""

import pytest
import torch
from torch.utils.data import Dataset

from compress.common.errors import PipelineInvalid
from compress.data.infer_signature import described, inputs_of
from compress.data.splits import Splits


class Made(Dataset):
    def __init__(self, make, count=50) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return self.make(index)


def inferred(make, parameters=("image", "mask")) -> str:
    splits = Splits({"train": Made(make), "val": Made(make)}, batch_size=8)
    return described(inputs_of(splits, lambda: parameters))


def of_length(length: int) -> torch.Tensor:
    return torch.ones(length, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda i: (torch.zeros(1, 8, 8), i % 3), "image [batch, 1, 8, 8] float32"),
        (
            lambda i: ((torch.zeros(3), torch.ones(2, dtype=torch.bool)), i % 3),
            "image [batch, 3] float32, mask [batch, 2] bool",
        ),
        (
            lambda i: {"b": of_length(9), "labels": i, "a": torch.zeros(4)},
            "b [batch, 9] int64, a [batch, 4] float32",
        ),
        (
            lambda i: {"input_ids": of_length(3 + i % 4), "attention_mask": of_length(3 + i % 4)},
            "input_ids [batch, length] int64, attention_mask [batch, length] int64",
        ),
        (
            lambda i: {"question": of_length(3 + i % 4), "text": of_length(3 + i % 5)},
            "question [batch, length] int64, text [batch, text_length] int64",
        ),
        (lambda i: (torch.zeros(3, 8 + i % 2, 9), i), "image [batch, 3, image_2, 9] float32"),
        (lambda i: (torch.tensor(i), i % 2), "image [batch] int64"),
    ],
)
def test_samples_tell_names_shapes_and_types(make, found: str) -> None:
    assert inferred(make) == found


def test_without_enough_parameters_inputs_are_numbered() -> None:
    both = inferred(lambda i: ((torch.zeros(3), torch.zeros(2)), i), parameters=["x"])
    assert both == "input_0 [batch, 3] float32, input_1 [batch, 2] float32"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda i: (torch.zeros(*[2] * (1 + i % 2)), i),
            r"sample 1 of split 'train' has other dim",
        ),
        (
            lambda i: {"x": 1 / (i - 1)},
            r"sample 1 of split 'train' cannot be read: ZeroDivisionErr",
        ),
        (
            lambda i: (torch.zeros(2, dtype=torch.complex64), i),
            "input 'image' of the samples, comp",
        ),
    ],
)
def test_samples_that_do_not_agree_are_refused(make, message: str) -> None:
    with pytest.raises(PipelineInvalid, match=message):
        inferred(make)
