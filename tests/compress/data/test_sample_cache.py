"""Samples of a slow dataset are read from it once, and from the disk ever after."""

import errno
import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from compress.common.errors import PipelineInvalid, StageFailed
from compress.data.batch import Batch, collate
from compress.data.loader_config import Loading
from compress.data.sample_cache import PROBES, CachedDataset, RecordLog
from compress.data.splits import DataReference, Splits

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SAMPLES = 24
ROOT = Path(__file__).parents[3]
SLOW = '''
from pathlib import Path
import torch
from torch.utils.data import Dataset

class Slow(Dataset):
    """Sentences whose every reading is noted."""
    def __init__(self, trace, first):
        self.trace, self.first = Path(trace), first
    def __len__(self):
        return 24
    def __getitem__(self, index):
        with self.trace.open("a") as stream:
            stream.write(f"{index}\\n")
        ids = torch.arange(self.first, self.first + index + 1)
        return {"ids": ids, "half": torch.ones(2, dtype=torch.bfloat16), "labels": index % 3}

def slow(trace, first=0):
    return {"train": Slow(trace, first)}
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def splits(folder: Path, first: int = 0, **loading) -> Splits:
    settings = Loading(**{"cache": str(folder / "cache"), **loading})
    arguments = {"trace": str(folder / "trace"), "first": first}
    return DataReference("slow:slow", arguments, folder, 8, settings).load()


def readings(folder: Path) -> int:
    trace = folder / "trace"
    count = len(trace.read_text().splitlines()) if trace.exists() else 0
    trace.unlink(missing_ok=True)
    return count


def equal(some: list[Batch], others: list[Batch]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(
        torch.equal(x, y) and x.dtype == y.dtype
        for one, other in pairs
        for x, y in zip((*one.inputs, one.target), (*other.inputs, other.target), strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_is_read_once_and_batches_stay_the_same(folder, workers) -> None:
    plain = list(splits(folder, cache=None).batches("train"))
    readings(folder)
    data = splits(folder, workers=workers)
    assert equal(list(data.batches("train")), plain)
    assert readings(folder) == SAMPLES + 2 * PROBES
    assert equal(list(data.batches("train")), plain)
    assert readings(folder) == 0
    assert data.fingerprint() == splits(folder, cache=None).fingerprint()


def test_another_process_and_a_later_run_read_from_the_disk(folder, fresh_torch) -> None:
    data = splits(folder)
    expected = list(data.batches("train"))
    readings(folder)
    (folder / "splits.pickle").write_bytes(pickle.dumps(data))
    fresh_torch(
        f"import os, pickle; os.chdir({str(folder)!r})\n"
        "d = pickle.load(open('splits.pickle', 'rb')); list(d.batches('train'))"
    )
    assert readings(folder) == 0
    assert equal(list(splits(folder).batches("train")), expected)
    assert readings(folder) == 2 * PROBES


def test_other_data_are_not_mixed_up_with_those_before(folder) -> None:
    list(splits(folder).batches("train"))
    other = list(splits(folder, first=100).batches("train"))
    assert equal(other, list(splits(folder, first=100, cache=None).batches("train")))
    (folder / "slow.py").write_text(SLOW.replace("index % 3", "index % 2"))
    changed = list(splits(folder).batches("train"))
    assert max(int(batch.target.max()) for batch in changed) == 1


class Held(Dataset):
    """Samples in memory that a test may change."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.values[index], index


def test_changed_samples_make_another_folder(tmp_path) -> None:
    loading = Loading(cache=str(tmp_path))
    list(Splits({"train": Held(torch.zeros(9, 2))}, loading=loading).batches("train"))
    (batch,) = Splits({"train": Held(torch.ones(9, 2))}, loading=loading).batches("train")
    assert torch.equal(batch.inputs[0], torch.ones(9, 2))
    assert len(list(tmp_path.iterdir())) == 2


def _truncate(content: bytes) -> bytes:
    return content[:-3]


def _flip_content(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _flip_header(content: bytes) -> bytes:
    return content[:9] + bytes([content[9] ^ 1]) + content[10:]


@pytest.mark.parametrize(
    ("damage", "again"), [(_truncate, 1), (_flip_content, 1), (_flip_header, SAMPLES)]
)
@pytest.mark.parametrize("opened", ["before", "after"])
def test_damaged_samples_are_read_again_replaced_and_logged(folder, damage, again, opened, caplog):
    data = splits(folder)
    expected = list(data.batches("train"))
    (file,) = (folder / "cache").rglob("*.samples")
    file.write_bytes(damage(file.read_bytes()))
    if opened == "after":
        data = splits(folder)
        data.split("train")
    readings(folder)
    with caplog.at_level(logging.WARNING, "compress"):
        assert equal(list(data.batches("train")), expected)
    in_place = opened == "before" and damage is _flip_header  # nobody looks at it again
    assert readings(folder) == (0 if in_place else again)
    half_written = opened == "after" and damage is _truncate
    assert ("is damaged" in caplog.text) == (not half_written and not in_place)
    caplog.clear()
    healed = splits(folder)
    assert equal(list(healed.batches("train")), expected)
    assert readings(folder) == 2 * PROBES + (again if in_place else 0)


def test_two_processes_that_write_the_same_samples_do_each_other_no_harm(tmp_path) -> None:
    one, other = (RecordLog(tmp_path, 3) for _ in range(2))
    one.append(0, b"first")
    other.append(0, b"first")
    other.append(2, b"second")
    assert one.read(2) is None
    one.refresh()
    assert [one.read(number) for number in range(3)] == [b"first", None, b"second"]
    assert [RecordLog(tmp_path, 3).read(n) for n in range(3)] == [b"first", None, b"second"]


def test_what_a_killed_process_left_is_not_read(tmp_path) -> None:
    RecordLog(tmp_path, 3).append(0, b"whole")
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for end in range(len(whole), 2 * len(whole)):
        file.write_bytes((whole + whole)[:end])
        assert RecordLog(tmp_path, 3).read(0) == b"whole"


def test_a_process_that_was_forked_appends_to_a_file_of_its_own(tmp_path) -> None:
    segments = RecordLog(tmp_path, 3)
    segments.append(0, b"parent")
    child = os.fork()
    if child == 0:
        segments.append(1, b"child")
        os._exit(0)
    os.waitpid(child, 0)
    segments.append(2, b"parent")
    segments.refresh()
    assert [segments.read(n) for n in range(3)] == [b"parent", b"child", b"parent"]
    assert len(list(tmp_path.iterdir())) == 2


class Augmented(Held):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.values[index] + torch.rand(2), index


def test_random_samples_are_refused(tmp_path) -> None:
    data = Splits({"train": Augmented(torch.zeros(9, 2))}, loading=Loading(cache=str(tmp_path)))
    for _ in range(2):
        with pytest.raises(PipelineInvalid, match=r"^data\.loader\.cache: sample 0 of split 'tra"):
            data.fingerprint()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_clear_error_and_leaves_nothing_half_written(
    tmp_path, monkeypatch
) -> None:
    data = Splits({"train": Held(torch.zeros(9, 2))}, loading=Loading(cache=str(tmp_path)))
    write, room = os.pwrite, [400]

    def nearly_full(descriptor: int, content: bytes, place: int) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = content[: room[0]]
        room[0] -= len(part)
        return write(descriptor, part, place)

    monkeypatch.setattr(os, "pwrite", nearly_full)
    with pytest.raises(StageFailed, match=r"^data\.loader\.cache: .*No space left.*make room"):
        list(data.batches("train"))
    (file,) = tmp_path.rglob("*.samples")
    assert 0 < file.stat().st_size < 400
    room[0] = 10**6
    assert torch.equal(next(iter(data.batches("train"))).inputs[0], torch.zeros(9, 2))


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path) -> None:
    (tmp_path / "file").touch()
    loading = Loading(cache=str(tmp_path / "file"))
    with pytest.raises(PipelineInvalid, match=r"cannot be made \(Not a directory\)"):
        Splits({"train": Held(torch.zeros(9, 2))}, loading=loading).fingerprint()


def test_what_is_in_memory_is_not_cached(tmp_path) -> None:
    held = TensorDataset(torch.ones(3, 2))
    assert Splits({"train": held}, loading=Loading(cache=str(tmp_path))).split("train") is held


@pytest.mark.parametrize(
    "sample",
    [
        (torch.ones(2), 1),
        ((torch.ones(2), torch.zeros(1, dtype=torch.int8)), 0.5),
        torch.ones(3),
        (torch.ones(3),),
        {"b": torch.ones(2), "a": torch.tensor(True)},
    ],
)
def test_samples_of_every_form_make_the_same_batch(tmp_path, sample) -> None:
    class One(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int):
            return sample

    cached = CachedDataset(One(), tmp_path)
    expected = collate([sample])
    for _ in range(2):
        batch = collate(cached.__getitems__([0]))
        assert all(torch.equal(x, y) for x, y in zip(batch.inputs, expected.inputs, strict=True))
        assert (batch.target is None) == (expected.target is None)
        assert batch.target is None or torch.equal(batch.target, expected.target)
    with pytest.raises(IndexError):
        cached[1]


def test_the_folder_is_relative_to_the_pipeline_file(tmp_path) -> None:
    assert Loading(cache="samples").resolve_paths(tmp_path).cache == str(tmp_path / "samples")
    assert Loading(cache="/samples").resolve_paths(tmp_path).cache == "/samples"
    assert Loading().resolve_paths(tmp_path).cache is None


def test_a_file_copied_from_another_folder_is_not_read(tmp_path, caplog) -> None:
    one, other = tmp_path / "train-1", tmp_path / "train-2"
    for folder in (one, other):
        folder.mkdir()
    RecordLog(one, 3).append(0, b"another dataset's")
    (file,) = one.iterdir()
    (other / file.name).write_bytes(file.read_bytes())
    assert RecordLog(other, 3).read(0) is None
    assert "is damaged" in caplog.text
    assert RecordLog(one, 3).read(0) == b"another dataset's"
