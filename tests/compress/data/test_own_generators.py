import random

import numpy as np
import pytest
import torch

from compress.data.dataloader import Reader
from compress.data.loader_config import Loading
from compress.data.own_generators import own_generators, seed_generators, states_restored
from compress.data.splits import Splits
from tests.compress.data.augmented import Augmented, Dictionaries, data

KINDS = ["global", "module", "closure", "torch", "numpy", "legacy numpy", "python", "lazy"]

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def inputs(splits: Splits, order: list[int], batch_size: int, seed: int = 3) -> torch.Tensor:
    """Return the samples' inputs in the order of their indices."""
    read = torch.cat([b.inputs[0] for b in splits.read("train", order, batch_size, seed)])
    return read[torch.tensor(order).argsort()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_draws_the_same_in_any_batch_order_and_dataset_object(kind):
    first, again = Splits(data(kind)), Splits(data(kind))
    expected = inputs(first, list(range(80)), 8)
    shuffled = torch.randperm(80, generator=torch.Generator().manual_seed(0)).tolist()
    assert torch.equal(inputs(again, shuffled, 5), expected)
    assert not torch.equal(inputs(again, shuffled, 5, seed=4), expected)
    noise = expected - first.datasets["train"].datasets[0].dataset.x
    assert len(set(noise[:, 0].tolist())) > 70  # samples differ from each other
    assert first.fingerprint() == again.fingerprint() != Splits(data(kind, seed=1)).fingerprint()


@pytest.mark.parametrize("kind", ["lazy", "numpy"])
def test_a_sample_draws_the_same_in_any_number_of_workers(kind):
    expected = inputs(Splits(data(kind)), list(range(80)), 8)
    splits = Splits(data(kind), loading=Loading(workers=2))
    assert torch.equal(inputs(splits, list(range(80)), 8), expected)


def test_reading_leaves_all_generators_as_they_were():
    owned = [np.random.default_rng(1), np.random.RandomState(1), random.Random(1)]
    owned.append(torch.Generator().manual_seed(1))

    def draw() -> list[float]:
        return [*(g.random() for g in owned[:3]), float(torch.rand(1, generator=owned[3]))]

    states = [owned[0].bit_generator.state, owned[1].get_state(), owned[2].getstate()]
    states.append(owned[3].get_state())
    expected = draw()
    owned[0].bit_generator.state = states[0]
    owned[1].set_state(states[1])
    owned[2].setstate(states[2])
    owned[3].set_state(states[3])
    with states_restored(owned):
        seed_generators(owned, 2**32 - 1)
        seeded = draw()
        seed_generators(owned, 2**32 - 1)
        assert draw() == seeded != expected
    assert draw() == expected


def test_generators_are_found_once_and_the_global_ones_and_the_systems_are_not():
    shared = random.Random()
    nested = {"a": [shared, (shared,)], "b": random.SystemRandom(), "c": torch.default_generator}
    nested["again"] = nested
    assert own_generators(nested, np.random.mtrand._rand) == [shared]


def test_random_numbers_of_a_collate_fn_follow_from_the_seed():
    rng = np.random.default_rng()

    def masked(samples):
        return float(torch.rand(1)) + rng.random()

    def read(seed: int, loading: Loading) -> list[float]:
        reader = Reader(Augmented("numpy", 16, 0), loading, masked, keeps_workers=False)
        return list(reader.read(range(16), 4, seed))

    assert read(1, Loading()) == read(1, Loading(workers=2)) != read(2, Loading())
    assert len(set(read(1, Loading()))) == 4


def test_what_no_seed_repeats_is_known_by_what_the_dataset_holds():
    first, again = Splits(data("system")), Splits(data("system"))
    assert first.contents().unrepeatable == {"train"}
    assert first.fingerprint() == again.fingerprint()
    assert first.fingerprint() != Splits(data("system", seed=1)).fingerprint()
    assert not Splits(data("numpy")).contents().unrepeatable


def test_lengths_to_bucket_by_are_the_same_in_each_run():
    loading = Loading(bucket_by="ids")
    lengths = [
        Splits({"train": Dictionaries("numpy", 64, 0)}, loading=loading).lengths("train")
        for _ in range(2)
    ]
    assert lengths[0] == lengths[1] and len(set(lengths[0])) > 2
