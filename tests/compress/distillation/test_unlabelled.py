"""Samples without labels, in a split of their own or among the others."""

from dataclasses import replace

import pytest
import torch

from compress.data.batch import collate
from compress.data.splits import Splits, with_unlabelled


def test_unlabelled_samples_come_after_those_of_train_without_their_labels(school):
    splits = school.data(train=10, unlabelled=6)
    data = with_unlabelled(splits)
    assert len(data.split("train")) == 16
    assert len(splits.split("train")) == 10
    (batch,) = data.read("train", range(16), 16)
    assert torch.equal(batch.target[:10], splits.datasets["train"].tensors[1])
    assert batch.target[10:].tolist() == [-100] * 6
    assert torch.equal(batch.inputs[0][10:], splits.datasets["unlabelled"].tensors[0])
    (alone,) = data.read("train", [12, 14], 2)
    assert alone.target is None
    without = school.data()
    assert with_unlabelled(without) is without


@pytest.mark.parametrize("workers", [0, 1])
def test_it_is_the_same_in_another_process(school, workers):
    import pickle

    splits = with_unlabelled(school.data(train=10, unlabelled=6))
    splits = replace(splits, loading=splits.loading.model_copy(update={"workers": workers}))
    there = pickle.loads(pickle.dumps(splits))
    batches = [next(iter(s.read("train", [3, 12], 2))) for s in (splits, there)]
    assert torch.equal(batches[0].inputs[0], batches[1].inputs[0])
    assert batches[1].target.tolist()[1] == -100
    assert splits.fingerprint() == there.fingerprint() != school.data(train=10).fingerprint()


def test_mappings_lose_their_labels_too():
    rows = [{"ids": torch.arange(n), "labels": torch.tensor(1)} for n in (2, 3)]
    splits = with_unlabelled(Splits({"train": rows[:1], "unlabelled": rows[1:]}))
    (batch,) = splits.read("train", [0, 1], 2)
    assert batch.inputs[0].tolist() == [[0, 1, 0], [0, 1, 2]]
    assert batch.target.tolist() == [1, -100]


def test_a_batch_may_be_partly_without_labels():
    x, y = torch.zeros(2), torch.tensor(3)
    assert collate([(x, None), (x, y)]).target.tolist() == [-100, 3]
    assert collate([(x, None), (x, None)]).target is None
    found = collate([(x, None), (x, torch.tensor(0.5))]).target
    assert found[0].isnan() and found[1] == 0.5


@pytest.mark.slow
def test_unlabelled_data_teaches(school):
    student = school.make()
    little = school.data(train=16)
    more = school.data(train=16, unlabelled=160)
    settings = {"epochs": 8, "learning_rate": 0.05, "keep": "last"}
    # As many steps: 16 samples are a step an epoch, 176 are 11.
    without = school.distil(
        student, school.context(little), **settings | {"epochs": 8 * 11}, hard_weight=1
    )
    with_more = school.distil(student, school.context(more), **settings, hard_weight=0.1)
    test = school.context(school.data())
    assert test.score(with_more) > test.score(without)
    assert test.score(with_more) > 0.8


def test_the_labels_of_unlabelled_samples_are_not_looked_at(school):
    student, given = school.make(), school.data(train=32, unlabelled=32)
    x, y = given.datasets["unlabelled"].tensors
    other = Splits({**given.datasets, "unlabelled": torch.utils.data.TensorDataset(x, y * 0)})
    settings = {"hard_weight": 1.0, "keep": "last"}
    first = school.distil(student, school.context(given), **settings)
    second = school.distil(student, school.context(other), **settings)
    assert school.same(first, second)


def test_samples_without_labels_among_the_others_train(school):
    student = school.make()
    mixed = school.distil(student, school.context(school.data(kind="partly")), keep="last")
    whole = school.distil(student, school.context(school.data()), keep="last")
    assert not school.same(mixed, whole)
    losses = [e["loss"] for e in mixed.manifest.facts["history"][1:]]
    assert losses[1] < losses[0]
