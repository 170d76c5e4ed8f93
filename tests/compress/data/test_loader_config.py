import os
import pickle
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from compress.common.errors import PipelineInvalid, StageFailed
from compress.data.batch import Batch, collate
from compress.data.loader_config import Loading
from compress.data.splits import DataReference, Splits

# torch advises against more workers than cores, which is no concern of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

EXAMPLES = Path(__file__).parents[3] / "examples"


class Augmented(Dataset):
    """Samples with noise of three kinds, which say the process that read them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])
        return torch.cat([torch.tensor([float(index)]), noise]), os.getpid()


class Failing(Augmented):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise KeyError(f"no sample {index}\nsecond line")


def read(splits: Splits, seed: int = 0) -> list[Batch]:
    return list(splits.read("train", range(23, -1, -1), 5, seed))


def inputs(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.inputs[0] for batch in batches])


def readers(batches: list[Batch]) -> set[int]:
    return {int(pid) for batch in batches for pid in batch.target}


def test_the_number_of_workers_does_not_change_the_batches() -> None:
    here = read(Splits({"train": Augmented()}))
    assert readers(here) == {os.getpid()}
    assert [len(batch) for batch in here] == [5, 5, 5, 5, 4]
    for workers in (1, 2):
        there = read(Splits({"train": Augmented()}, loading=Loading(workers=workers)))
        assert torch.equal(inputs(here), inputs(there))
        assert len(readers(there)) == workers and os.getpid() not in readers(there)


def test_what_is_drawn_follows_the_seed_and_leaves_the_callers_generators() -> None:
    splits, state = Splits({"train": Augmented()}), torch.get_rng_state()
    assert torch.equal(inputs(read(splits, 1)), inputs(read(splits, 1)))
    assert not torch.equal(inputs(read(splits, 1)), inputs(read(splits, 2)))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(inputs(read(splits)).unique()) == 24 * 4


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_live_as_long_as_they_are_kept(persistent) -> None:
    loading = Loading(workers=2, persistent_workers=persistent)
    splits = Splits({"train": Augmented()}, loading=loading)
    with splits.keep_workers():
        first, second = read(splits, 1), read(splits, 2)
        assert (readers(first) == readers(second)) == persistent
        assert not torch.equal(inputs(first), inputs(second))
    alone = Splits({"train": Augmented()})
    assert torch.equal(inputs(second), inputs(read(alone, 2)))
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True)
    assert not (readers(first) | readers(second)) & set(map(int, children.stdout.split()))


def test_a_workers_error_is_raised_with_its_own_message() -> None:
    splits = Splits({"train": Failing()}, loading=Loading(workers=2))
    with pytest.raises(StageFailed, match=r"^KeyError: 'no sample 23.*'$"):
        read(splits)
    with pytest.raises(KeyError, match="no sample 23"):
        read(Splits({"train": Failing()}))


class OnCuda(Augmented):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        # As torch words it in a process forked from one that uses CUDA.
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with …")


def test_a_worker_that_would_use_cuda_is_refused_with_what_to_do() -> None:
    splits = Splits({"train": OnCuda()}, loading=Loading(workers=1))
    with pytest.raises(StageFailed, match=r"^the dataset uses a CUDA device.*workers: 0$"):
        read(splits)


def test_settings_travel_and_only_those_that_change_batches_change_the_fingerprint() -> None:
    def splits(**loading) -> Splits:
        return Splits({"train": Sentences()}, loading=Loading(**loading))

    assert pickle.loads(pickle.dumps(splits(workers=3))).loading.workers == 3
    assert splits(workers=3).fingerprint() == splits().fingerprint()
    assert splits(bucket_by="ids").fingerprint() != splits().fingerprint()
    assert splits(pad_values={"ids": 1}).fingerprint() != splits().fingerprint()


class Sentences(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(1, 65, (256,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(1, self.lengths[index] + 1)
        return {"ids": ids, "mask": torch.ones_like(ids), "labels": torch.tensor(index % 2)}


def test_sequences_of_mappings_are_padded_to_the_longest_of_the_batch() -> None:
    samples = [
        {"ids": torch.tensor(ids), "mask": torch.ones(len(ids)), "labels": torch.tensor(ids) + 10}
        for ids in ([5, 6, 7], [8])
    ]
    batch = collate(samples, {"ids": 9})
    assert batch.inputs[0].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.inputs[1].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.target.tolist() == [[15, 16, 17], [18, -100, -100]]


def test_other_shapes_that_differ_are_refused() -> None:
    pairs = [(torch.ones(3), 0), (torch.ones(2), 0)]
    images = [{"image": torch.ones(2, 3)}, {"image": torch.ones(2, 2)}]
    for samples, shapes in ((pairs, r"\[2\] and \[3\]"), (images, r"\[2, 2\] and \[2, 3\]")):
        with pytest.raises(PipelineInvalid, match=f"shapes {shapes}; only 1-D"):
            collate(samples)


def test_lengths_are_those_of_the_named_input() -> None:
    sentences = Sentences()
    splits = Splits({"train": sentences}, loading=Loading(bucket_by="ids"))
    assert splits.lengths("train") == sentences.lengths
    assert Splits({"train": sentences}).lengths("train") is None
    with pytest.raises(PipelineInvalid, match=r"bucket_by: samples of split 'train' have no 'x'"):
        Splits({"train": sentences}, loading=Loading(bucket_by="x")).lengths("train")


@pytest.mark.slow
def test_memory_mapped_arrays_are_read_by_workers(tmp_path) -> None:
    rows = {"train": 20, "val": 10}
    for name, count in rows.items():
        np.save(tmp_path / f"{name}_x.npy", np.random.rand(count, 3).astype(np.float32))
        np.save(tmp_path / f"{name}_y.npy", np.arange(count))
    reference = DataReference(
        "memory_mapped:splits", {"folder": str(tmp_path)}, EXAMPLES, 8, Loading(workers=2)
    )
    splits = reference.load()
    batches = list(splits.batches("train"))
    assert torch.equal(torch.cat([b.target for b in batches]), torch.arange(20))
    expected = torch.from_numpy(np.load(tmp_path / "train_x.npy"))
    assert torch.equal(inputs(batches), expected)
    before = splits.fingerprint()
    np.save(tmp_path / "train_y.npy", np.arange(20) + 1)
    assert reference.load().fingerprint() != before
