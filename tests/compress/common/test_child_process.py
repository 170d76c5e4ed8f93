"""Reading in a child process: its results and errors arrive, and its limits hold."""

import logging
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.foreign import child_process
from compress.common.foreign.child_process import read_in_child, stored_bytes


def never_ends() -> None:
    while True:
        pass


def test_a_result_arrives_and_nothing_else(capfd: pytest.CaptureFixture, caplog) -> None:
    here: list[int] = []

    def read() -> tuple[int, str]:
        print("printed")
        os.write(2, b"printed by a native library")
        logging.getLogger("compress").error("logged")
        here.append(1)
        return os.getpid(), "content"

    process, content = read_in_child("model.pt", read)
    assert (process != os.getpid(), content) == (True, "content")
    assert not here
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_an_error_is_raised_as_it_was() -> None:
    def refuse() -> None:
        raise PipelineInvalid("model.pt: holds no weights")

    with pytest.raises(PipelineInvalid, match=r"^model\.pt: holds no weights$"):
        read_in_child("model.pt", refuse)
    with pytest.raises(KeyError):
        read_in_child("model.pt", lambda: {}["weight"])

    class _Refused(Exception):
        def __init__(self, file: str, place: int) -> None:
            super().__init__(f"{file} at {place}")

    def refuse_otherwise() -> None:
        raise _Refused("model.pt", 3)

    with pytest.raises(RuntimeError, match=r"^_Refused: model\.pt at 3$"):
        read_in_child("model.pt", refuse_otherwise)


def test_too_much_memory_is_refused_while_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "MEMORY", 2**26)

    def fill() -> int:
        return len([bytearray(b"1" * 2**22) for _ in range(200)])

    with pytest.raises(ArtifactInvalid, match=r"^model\.pt: .* more than 0\.06\d GiB of memory"):
        read_in_child("model.pt", fill)


def test_a_file_may_take_some_copies_of_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(child_process, "MEMORY", 2**24)
    file = tmp_path / "model.pt"
    file.write_bytes(os.urandom(2**24))

    def read() -> int:
        copies = [file.read_bytes() for _ in range(5)]
        time.sleep(0.1)
        return len(copies)

    assert read_in_child("model.pt", read, file) == 5
    with pytest.raises(ArtifactInvalid, match="GiB of memory"):
        read_in_child("model.pt", read)
    assert read_in_child("model.pt", read, inputs=2**21) == 5


def test_a_hole_in_a_file_allows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    with file.open("wb") as stream:
        stream.seek(2**40)
        stream.write(b"end")
    assert 0 < stored_bytes(file) < 2**20
    assert stored_bytes(tmp_path) == stored_bytes(file)


def test_what_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "SECONDS", 1)
    with pytest.raises(ArtifactInvalid, match="more than 1 s of processor time"):
        read_in_child("model.pt", never_ends)
    monkeypatch.setattr(child_process, "LONGEST", 0.3)
    with pytest.raises(ArtifactInvalid, match=r"takes more than 0\.3 s"):
        read_in_child("model.pt", lambda: time.sleep(60))


def test_a_native_crash_ends_the_child_alone() -> None:
    with pytest.raises(ArtifactInvalid, match="was ended by SIGSEGV"):
        read_in_child("model.pt", lambda: os.kill(os.getpid(), signal.SIGSEGV))


def test_what_is_nested_too_deeply_is_refused() -> None:
    def descend() -> None:
        descend()

    with pytest.raises(ArtifactInvalid, match=r"^model\.pt: is nested too deeply$"):
        read_in_child("model.pt", descend)


def test_the_child_ends_with_an_interrupted_parent() -> None:
    def interrupt_parent() -> None:
        time.sleep(1)  # Python ignores an interrupt within the parent's hooks after a fork
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    before, started = psutil.Process().children(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        read_in_child("model.pt", interrupt_parent)
    assert time.monotonic() - started < 30
    assert not {*psutil.Process().children()} - {*before}
