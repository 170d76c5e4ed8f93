"""What is known of samples without another pass: labels, NaN, and whether splits share them."""

from functools import partial

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from compress.common.errors import PipelineInvalid
from compress.data.fingerprint import SplitFacts, facts_of_rows
from compress.data.loader_config import Loading
from compress.data.splits import Splits


class ByIndex(Dataset):
    """The same samples, read one by one."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.rows = tensors

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int):
        return tuple(rows[index] for rows in self.rows)


def samples(seed: int = 0, count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)), (
        torch.arange(count) % 4
    )


@pytest.mark.parametrize("made", [TensorDataset, ByIndex])
def test_samples_are_known_again_whatever_type_their_numbers_have(made) -> None:
    x, y = samples()
    for other in (
        TensorDataset(x[5:], y[5:].to(torch.uint8)),
        ByIndex(x[5:], y[5:].float()),
        ByIndex(x[5:].double(), y[5:].int()),
    ):
        facts = Splits({"train": made(x, y), "val": other}).contents().facts
        assert facts["val"].shared_with(facts["train"]) == 15
    apart = Splits({"train": made(x, y), "val": made(x, y + 1), "test": made(-x, y)})
    facts = apart.contents().facts
    assert facts["val"].shared_with(facts["train"]) == 0, "other labels"
    assert facts["test"].shared_with(facts["train"]) == 0


@pytest.mark.parametrize("made", [TensorDataset, ByIndex])
def test_the_first_label_without_a_class_is_named(made) -> None:
    x, y = samples()
    y[3], y[7], y[9] = -100, 11, -1
    facts = Splits({"val": made(x, y)}).contents().facts["val"]
    with pytest.raises(PipelineInvalid, match=r"^split 'val', sample 7: label 11 .* 0 to 3 \(-100"):
        facts.check_labels("val", 4)
    with pytest.raises(PipelineInvalid, match=r"sample 9: label -1 is out of range"):
        facts.check_labels("val", 12)
    assert int(facts.rows["labelled"].sum()) == 19


class FromZero(TensorDataset):
    """Counts its labels from 0, which it holds counted from 1."""

    def __getitem__(self, index: int):
        x, y = super().__getitem__(index)
        return x, y - 1


def from_zero(rows):
    """Return a batch whose labels count from 0."""
    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]) - 1


def boxes(rows):
    """Return a batch of images with boxes."""
    return torch.stack([x for x, _ in rows]), [boxes for _, boxes in rows]


@pytest.mark.parametrize(
    ("made", "loading"),
    [(FromZero, Loading()), (TensorDataset, Loading(collate_fn=f"{__name__}:from_zero"))],
)
def test_labels_are_those_of_the_samples_and_not_what_a_dataset_holds(made, loading) -> None:
    x, y = samples()
    facts = Splits({"val": made(x, y + 1)}, loading=loading).contents().facts["val"]
    facts.check_labels("val", 4)
    assert (facts.rows["low"].min(), facts.rows["high"].max()) == (0, 3)


def test_a_sample_with_several_boxes_is_one_sample() -> None:
    x, _ = samples()
    x[7, 1] = torch.nan
    rows = [(a, {"boxes": torch.ones(i % 3 + 1, 4)}) for i, a in enumerate(x)]
    for loading in (Loading(), Loading(collate_fn=f"{__name__}:boxes")):
        facts = Splits({"val": rows}, loading=loading).contents().facts["val"]
        assert len(facts.rows) == 20
        assert facts.first(facts.rows["nan"]) == 7


def test_of_samples_that_are_read_one_by_one_so_many_are_spread() -> None:
    x, y = samples(count=100)
    read = []

    class Counted(ByIndex):
        def __getitem__(self, index: int):
            read.append(index)
            return super().__getitem__(index)

    contents = Splits({"val": Counted(x, y)}).contents(most=10)
    assert contents.sampled == ["val"] and len(contents.facts["val"].rows) == 10
    assert len({index // 10 for index in contents.facts["val"].indices}) == 10
    assert len(set(read)) < 25, "these, and those that show whether samples repeat"


def test_rows_and_single_samples_have_the_same_facts() -> None:
    x = torch.randn(6, 2, 3)
    x[4, 1, 1] = torch.nan
    y = torch.tensor([[1, -100], [-100, -100], [2, 5], [0, 0], [1, 1], [-3, 2]])
    together = facts_of_rows([x], [y])
    alone = [facts_of_rows([a[None]], [b[None]]) for a, b in zip(x, y, strict=True)]
    assert all((one == row).all() for one, row in zip(alone, together, strict=True))
    known = SplitFacts(range(6), together)
    assert known.first(known.rows["nan"]) == 4
    assert together["labelled"].tolist() == [True, False, True, True, True, True]
    assert [(r["low"], r["high"]) for r in together[[0, 2, 5]]] == [(1, 1), (2, 5), (-3, 2)]


def test_floats_are_read_in_the_models_type() -> None:
    x, y = samples()
    for kind in (torch.float64, torch.float16, torch.bfloat16):
        data = Splits({"val": ByIndex(x.to(kind), y)}, input_dtypes=("float32",))
        (batch,) = data.batches("val")
        assert batch.inputs[0].dtype == torch.float32
        assert torch.equal(batch.inputs[0], x.to(kind).float())
    (batch,) = Splits({"val": ByIndex(y, y)}, input_dtypes=("float32",)).batches("val")
    assert batch.inputs[0].dtype == torch.int64, "integers mean something else"


def test_a_loader_among_splits_is_refused() -> None:
    loader = partial(torch.utils.data.DataLoader, TensorDataset(*samples()))
    with pytest.raises(PipelineInvalid, match=r"'train' is a DataLoader, expected its dataset"):
        Splits({"train": loader()})
