"""`data.loader.collate_fn`: the user's own function makes the batches."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from compress.common.errors import PipelineInvalid
from compress.data.infer_signature import inputs_of
from compress.data.loader_config import Loading
from compress.data.splits import DataReference, Splits

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HERE = Path(__file__).parent


def load(function: str = "as_bytes", **loading) -> Splits:
    settings = Loading(collate_fn=f"texts:{function}", **loading)
    return DataReference("texts:data", {}, HERE, 4, settings).load()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_any_form_become_batches(workers: int) -> None:
    splits = load(workers=workers)
    batches = list(splits.read("train", range(12), 4))
    assert [tuple(b.inputs[0].shape) for b in batches] == [(4, 8), (4, 16), (4, 24)]
    assert torch.equal(batches[0].target, torch.tensor([0, 1, 0, 1]))
    assert splits.fingerprint() == load().fingerprint() != load("shouted").fingerprint()


def test_the_signature_is_inferred_from_batches_of_one() -> None:
    (ids,) = inputs_of(load(), lambda: ["ids"])
    assert (ids.name, ids.dtype, len(ids.shape)) == ("ids", "int64", 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("one_row", r"'texts:one_row' returned a tensor of shape \[1, 3\] for 4 samples"),
        ("broken", r"data.loader.collate_fn 'texts:broken': KeyError: 'ids'"),
        ("nothing", r"'texts:nothing': as a batch, a sample is nothing"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_batch_is_refused_in_one_line(function, message, workers) -> None:
    with pytest.raises(PipelineInvalid, match=message):
        list(load(function, workers=workers).read("train", range(12), 4))


def test_padding_belongs_to_the_function() -> None:
    with pytest.raises(ValidationError, match="found pad_values and collate_fn 'texts:as_bytes'"):
        Loading(collate_fn="texts:as_bytes", pad_values={"ids": 1})
