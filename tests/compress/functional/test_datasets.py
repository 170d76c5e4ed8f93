from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from compress.common.errors import PipelineInvalid
from compress.functional.in_memory import make_splits

X = torch.arange(24.0).view(6, 4)
Y = torch.arange(6) % 2


class Rows:
    """What this package uses of a Hugging Face dataset."""

    column_names = ["input_ids", "text", "label"]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index] * 3, "text": "words", "label": index % 2}


def flipped(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs).flip(1), torch.stack(targets)


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
        TensorDataset(X, Y),
        [(x, y) for x, y in zip(X, Y, strict=True)],
        (X.double().numpy(), Y.numpy()),
        {"train": (X, Y)},
    ],
    ids=["loader", "dataset", "list", "arrays", "splits"],
)
def test_data_of_any_form_become_the_same_batch(data: Any) -> None:
    splits = make_splits(data)
    assert splits is not None
    (batch,) = splits.batches("train", 6)
    assert torch.equal(batch.inputs[0], X)
    assert batch.inputs[0].dtype == torch.float32
    assert torch.equal(batch.target, Y)


def test_inputs_alone_and_several_inputs() -> None:
    for data in (X, X.numpy(), [*X], (X,)):
        (batch,) = make_splits(data).batches("train", 6)
        assert torch.equal(batch.inputs[0], X)
        assert batch.target is None
    (batch,) = make_splits((X, 2 * X, Y)).batches("train", 6)
    assert torch.equal(batch.inputs[1], 2 * X)
    assert torch.equal(batch.target, Y)


def test_rows_of_columns_keep_what_the_model_takes() -> None:
    splits = make_splits({"train": Rows(), "validation": Rows()}, parameters=["input_ids"])
    (batch,) = splits.batches("val", 6)
    assert batch.inputs[0].tolist() == [[i] * 3 for i in range(6)]
    assert batch.target.tolist() == [0, 1] * 3
    (batch,) = make_splits({"x": X, "labels": Y}).batches("train", 6)
    assert torch.equal(batch.inputs[0], X)
    assert torch.equal(batch.target, Y)


def test_a_loaders_own_way_to_collate_is_used() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=3, collate_fn=flipped)
    splits = make_splits(train=loader, val=loader)
    assert splits.batch_size == 3
    first, _ = splits.batches("val")
    assert torch.equal(first.inputs[0], X[:3].flip(1))
    with pytest.raises(PipelineInvalid, match="collated in different ways"):
        make_splits(train=loader, val=(X, Y))


def test_what_is_no_data_is_refused() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([X[0]])

    wrong = {
        "expected a DataLoader, a Dataset": 3,
        "have 6, 5 rows": (X, Y[:5]),
        "a Endless, expected a DataLoader": DataLoader(Endless()),
    }
    for message, data in wrong.items():
        with pytest.raises(PipelineInvalid, match=message):
            make_splits(data)
    assert make_splits() is None
    assert isinstance(make_splits((np.zeros((2, 4)),)).split("train")[0][0], torch.Tensor)


def test_a_hugging_face_dataset_is_read_as_its_columns() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": X.tolist(), "text": ["words"] * 6, "label": Y.tolist()}
    for data in (
        datasets.Dataset.from_dict(rows),
        datasets.Dataset.from_dict(rows).with_format("torch"),
    ):
        (batch,) = make_splits(datasets.DatasetDict(train=data), parameters=["x"]).batches(
            "train", 6
        )
        assert torch.equal(batch.inputs[0], X)
        assert torch.equal(batch.target, Y)


def test_columns_of_a_mapping_may_have_any_key() -> None:
    for name in ("self", 0):
        splits = make_splits({"train": {name: X, "other": 2 * X, "label": Y}})
        assert splits is not None
        (batch,) = splits.batches("train", 6)
        assert [x.tolist() for x in batch.inputs] == [X.tolist(), (2 * X).tolist()]
        assert torch.equal(batch.target, Y)
