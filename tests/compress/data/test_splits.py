import pickle

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from compress.common.counts import counted
from compress.common.errors import PipelineInvalid, StageFailed
from compress.data.batch import collate
from compress.data.loader_config import Loading
from compress.data.splits import DataReference, Splits


class Listed(Dataset):
    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]


X, Y = torch.arange(3.0), torch.tensor(1)


@pytest.mark.parametrize(
    ("sample", "inputs", "labelled"),
    [
        ((X, Y), 1, True),
        (((X, X + 1), Y), 2, True),
        ({"a": X, "b": X + 1, "labels": Y}, 2, True),
        ({"a": X}, 1, False),
        (X, 1, False),
        ((X,), 1, False),
        ([X, 1], 1, True),
    ],
)
def test_every_accepted_form_of_a_sample(sample, inputs: int, labelled: bool) -> None:
    batch = collate([sample, sample])
    assert len(batch.inputs) == inputs
    assert batch.inputs[0].shape == (2, 3)
    assert (batch.target is not None) == labelled


def test_another_form_is_refused() -> None:
    with pytest.raises(PipelineInvalid, match="a sample is a str"):
        collate(["text"])


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.ones(2), 0


@pytest.mark.parametrize(
    ("datasets", "found"),
    [
        (None, "nothing"),
        ([1], "a list"),
        ({}, "a dict"),
        ({"train": 3}, "split 'train' is a int"),
        ({"train": Listed([])}, "split 'train' is empty"),
        ({"val": Endless()}, "split 'val' is a stream and is read by index; only 'train'"),
        ({"train": iter([(1, 2), (3, 4)])}, "a second pass .* begins with another sample"),
    ],
)
def test_what_is_no_data_is_named(datasets, found: str) -> None:
    with pytest.raises(PipelineInvalid, match=found):
        Splits(datasets)


class DividedByWorker(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from ((torch.tensor([float(i)]), i) for i in range(number, 12, workers))


@pytest.mark.multiprocess
def test_a_stream_that_divides_itself_by_worker_is_read_whole() -> None:
    splits = Splits({"train": DividedByWorker()}, 4, Loading(workers=2))
    stream = splits.open_stream(seed=0)
    assert stream is not None
    batches = stream.read_batches([range(4), range(4, 12)], 0)
    read = [int(label) for batch in batches for label in batch.target]
    assert read == [*range(12)]


def test_calibration_is_a_seeded_sample_and_never_short(blobs: Splits) -> None:
    def drawn(seed: int) -> torch.Tensor:
        return torch.cat([b.inputs[0] for b in blobs.calibration(50, seed)])

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert drawn(1).shape == (50, 4)
    with pytest.raises(StageFailed, match=r"121 calibration samples.*has 120"):
        blobs.calibration(121, 0)


def test_the_fingerprint_follows_one_changed_value(blobs: Splits) -> None:
    before = blobs.fingerprint()
    assert before == blobs.fingerprint()
    blobs.datasets["val"].tensors[0][7, 2] += 1e-3
    assert blobs.fingerprint() != before


def test_the_fingerprint_reads_datasets_without_tensors() -> None:
    samples = [(torch.full((2,), float(i)), i) for i in range(10)]
    before = Splits({"train": Listed(samples)}).fingerprint()
    samples[9] = (samples[9][0], 8)
    assert Splits({"train": Listed(samples)}).fingerprint() != before


def test_splits_travel_as_a_reference(digits: Splits) -> None:
    packed = pickle.dumps(digits)
    assert len(packed) < 1000
    assert pickle.loads(packed).fingerprint() == digits.fingerprint()


def test_splits_without_a_reference_travel_whole() -> None:
    splits = Splits({"train": TensorDataset(torch.ones(3, 2))}, batch_size=7)
    assert pickle.loads(pickle.dumps(splits)).batch_size == 7


def test_a_failing_factory_is_one_line(tmp_path) -> None:
    (tmp_path / "bad.py").write_text("def data():\n    raise KeyError('nope')\n")
    with pytest.raises(PipelineInvalid, match=r"data\.factory 'bad:data': KeyError: 'nope'"):
        DataReference("bad:data", {}, tmp_path, 8).load()


def test_a_mapping_is_read_in_the_models_order() -> None:
    ids, mask = torch.arange(3), torch.ones(3)
    swapped = [{"mask": mask, "ids": ids, "labels": Y}, {"ids": ids, "mask": mask, "labels": Y}]
    batch = collate(swapped, input_names=("ids", "mask"))
    assert torch.equal(batch.inputs[0], torch.stack([ids, ids]))
    assert torch.equal(collate(swapped).inputs[0], torch.stack([mask, mask]))
    with pytest.raises(PipelineInvalid, match="'ids', 'mask'"):
        collate([{"ids": ids, "labels": Y}], input_names=("ids", "mask"))


def test_the_fingerprint_sees_the_last_digit_and_the_batch_size() -> None:
    def fingerprint(target: float, batch_size: int = 8) -> str:
        samples = Listed([(torch.ones(2), torch.tensor(target))])
        return Splits({"train": samples}, batch_size).fingerprint()

    assert len({fingerprint(1.23456), fingerprint(1.23459), fingerprint(1.23456, 9)}) == 3


def test_calibration_samples_in_memory_are_not_hashed_once_more() -> None:
    def digest_and_hashed(train: Dataset) -> tuple[str | None, int]:
        before = counted().get("hashed.bytes", 0)
        digest = Splits({"train": train, "val": tensors}).calibration_digest(2, 0)
        return digest, counted().get("hashed.bytes", 0) - before

    tensors = TensorDataset(torch.zeros(4, 2), torch.zeros(4))
    assert digest_and_hashed(tensors) == (None, 0)
    assert digest_and_hashed(Listed([(X, Y)] * 4000))[0] is not None


def test_a_dataset_that_raises_is_one_line() -> None:
    class Broken(Listed):
        def __getitem__(self, index: int):
            raise KeyError("gone")

    with pytest.raises(PipelineInvalid, match="split 'val' cannot be read: KeyError: 'gone'"):
        Splits({"val": Broken([1])}).fingerprint()


def test_large_samples_are_evaluated_in_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.data.splits.CALLED_BYTES", 5 * 4 * 8)  # five rows of 8 floats
    x, y = torch.randn(10, 8), torch.arange(10)
    splits = Splits({"val": TensorDataset(x, y)}, batch_size=8)
    batches = list(splits.batches("val"))
    assert [len(batch) for batch in batches] == [5, 3, 2]
    assert torch.cat([batch.inputs[0] for batch in batches]).equal(x)
    assert torch.cat([batch.target for batch in batches]).equal(y)
    # A size that is asked for holds, as for models whose outputs depend on the batch.
    assert [len(batch) for batch in splits.batches("val", 8)] == [8, 2]


@pytest.mark.parametrize(("rows", "sizes"), [(2, [4, 4]), (0.5, [2] * 4), (0.2, [1] * 8)])
def test_few_rows_of_larger_samples_stay_together(
    rows: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of one row or two nobody sees how much samples differ.
    monkeypatch.setattr("compress.data.splits.CALLED_BYTES", int(rows * 4 * 8))
    splits = Splits({"val": TensorDataset(torch.randn(8, 8))}, batch_size=8)
    assert [len(batch) for batch in splits.batches("val")] == sizes
