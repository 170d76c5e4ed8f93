"""Files and folders that several threads of one process write at the same time."""

import errno
import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compress.artifacts.artifact import Artifact
from compress.common import atomic_files
from compress.common.atomic_files import remove_leftovers, write_atomically
from compress.common.signature import Signature, TensorSpec
from compress.export.onnx.stage import OnnxModel

SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))


def _cannot_exchange(new: Path, folder: Path) -> None:
    raise OSError(errno.EINVAL, "no such operation here")


@pytest.mark.parametrize("exchange", [atomic_files._exchange, _cannot_exchange])
def test_threads_that_write_one_artifact_leave_that_of_one(tmp_path, monkeypatch, exchange) -> None:
    monkeypatch.setattr(atomic_files, "_exchange", exchange)
    monkeypatch.setattr(atomic_files, "sync", lambda _: None)  # most of the time

    def write(number: int) -> None:
        with OnnxModel.atomic_write(tmp_path / "onnx", SIGNATURE, facts={"n": number}) as partial:
            (partial / OnnxModel.payload).write_bytes(b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(40)))
    made = Artifact.from_directory(tmp_path / "onnx")
    made.verify()
    assert made.payload_path.read_bytes() == b"%d" % made.fact("n")
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]


def test_threads_that_write_one_file_leave_that_of_one(tmp_path) -> None:
    contents = [json.dumps({"content": "x" * i}) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomically(tmp_path / "a.json", text), contents))
    assert (tmp_path / "a.json").read_text() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_that_was_taken_for_a_leftover_is_made_under_another_name(
    tmp_path, monkeypatch
) -> None:
    names: list[str] = []
    lock = fcntl.flock

    def lock_after_the_first_was_removed(descriptor: int, operation: int) -> None:
        (partial,) = tmp_path.iterdir()
        names.append(partial.name)
        if len(names) == 1:
            partial.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_first_was_removed)
    write_atomically(tmp_path / "a.json", "content")
    # A second process, which looked at the first file, may still be about to remove its name.
    assert len(names) == len({*names}) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_made_anew_while_another_thread_looks_for_leftovers_stays(
    tmp_path, monkeypatch
) -> None:
    left = tmp_path / ".artifact.partial-1-0"
    left.mkdir()
    lock = fcntl.flock

    def lock_after_its_owner_made_it_anew(descriptor: int, operation: int) -> None:
        left.rmdir()
        left.mkdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_its_owner_made_it_anew)
    remove_leftovers(tmp_path)
    assert left.is_dir()
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert not left.exists()
