"""Targets that are mappings, lists and tuples of tensors of different lengths."""

import resource

import pytest
import torch

from compress.common.errors import PipelineInvalid
from compress.data.batch import collate, collate_by
from compress.data.loader_config import Loading
from compress.data.splits import Splits

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Boxes(torch.utils.data.Dataset):
    def __init__(self, samples: int = 12, last: float = 0.0) -> None:
        self.samples, self.last = samples, last

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        count = index % 4
        boxes = torch.full((count, 4), float(index))
        if index == self.samples - 1:
            boxes += self.last
        return torch.ones(3) * index, {"boxes": boxes, "parts": (torch.arange(count), [index, 1])}


def expected(index: int):
    count = index % 4
    return {
        "boxes": torch.full((count, 4), float(index)),
        "parts": [torch.arange(count), torch.tensor([index, 1])],
    }


def assert_same(one, other):
    assert str(one) == str(other)


@pytest.mark.parametrize("loading", [{}, {"workers": 1}, {"cache": True}], ids=str)
def test_a_batch_has_a_list_with_the_target_of_each_sample(tmp_path, loading):
    if "cache" in loading:
        loading = {"cache": str(tmp_path)}
    splits = Splits({"train": Boxes()}, loading=Loading(**loading))
    for _ in range(2):  # the second time from the cache
        (batch,) = splits.read("train", [5, 0, 3], 3)
        assert_same(batch.target, [expected(5), expected(0), expected(3)])
    assert_same(batch.to("cpu").target, batch.target)


def test_worker_processes_need_few_files(monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    splits = Splits({"train": Boxes(512)}, loading=Loading(workers=1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        (batch,) = splits.read("train", range(512), 512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert_same(batch.target[7], expected(7))


def test_the_fingerprint_follows_every_tensor_and_its_name():
    same, other = (Splits({"val": Boxes(last=x)}).fingerprint() for x in (0.0, 1.0))
    assert Splits({"val": Boxes()}).fingerprint() == same != other
    one, renamed = ([(torch.ones(1), {name: torch.ones(2)})] for name in "ab")
    assert Splits({"val": one}).fingerprint() != Splits({"val": renamed}).fingerprint()


def test_samples_without_a_target_have_none_in_the_list():
    y = {"boxes": torch.ones(1, 4)}
    batch = collate([(torch.ones(2), y), torch.ones(2)])
    assert_same(batch.target, [y, None])


def test_what_is_no_target_is_refused_by_its_entry():
    with pytest.raises(PipelineInvalid, match=r"target\['file'\] is a str, expected a tensor"):
        collate([(torch.ones(2), {"file": "a.png"})])


def returned(target):
    return lambda samples: (torch.stack([x for x, _ in samples]), target(samples))


def test_a_collate_function_may_return_lists_and_mappings():
    samples = [Boxes()[i] for i in (1, 2)]
    made = collate_by(samples, returned(lambda s: [y for _, y in s]), "own", ())
    assert_same(made.target, [expected(1), expected(2)])
    made = collate_by(samples, returned(lambda s: {"first": torch.ones(2, 4)}), "own", ())
    assert_same(made.target, {"first": torch.ones(2, 4)})
    for wrong, message in (
        (lambda s: [{"boxes": torch.ones(1, 4)}], r"returned target: a list of 1 for 2 samples"),
        (lambda s: {"a": torch.ones(3)}, r"target: entry 'a': a tensor of shape \[3\] for 2"),
    ):
        with pytest.raises(PipelineInvalid, match=message):
            collate_by(samples, returned(wrong), "own", ())
