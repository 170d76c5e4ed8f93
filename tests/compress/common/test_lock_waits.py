"""Locks of libraries that a killed process left, or that another one holds."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout
from torch.utils import cpp_extension
from torch.utils.cpp_extension import load
from torch.utils.file_baton import FileBaton

from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.foreign import lock_waits
from compress.common.foreign.lock_waits import bounded_lock_waits

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_waits, "LONGEST_WAIT", 0.4)
    monkeypatch.setattr(lock_waits, "SECONDS_TO_NOTICE", 0.1)


def extension(folder: str) -> torch.nn.Module:
    """Compile an extension, as DeepSpeed does, and return a net."""
    (Path(folder) / "extension.cpp").write_text("")
    load("extension", [f"{folder}/extension.cpp"], build_directory=folder)
    return torch.nn.Linear(1, 1)


@pytest.mark.skipif(
    not hasattr(cpp_extension, "FileBaton"), reason="the lock of torch 2.15 ends with its process"
)
def test_an_extension_whose_lock_was_left_is_not_waited_for(tmp_path: Path, caplog) -> None:
    (tmp_path / "lock").touch()
    recipe = Recipe(factory=f"{__name__}:extension", arguments={"folder": str(tmp_path)})
    with pytest.raises(ArtifactInvalid, match=f"{tmp_path}/lock: has been there for .* remove it"):
        recipe.build()
    assert f"waiting for {tmp_path}/lock, which another process holds" in caplog.text


def test_a_lock_that_is_released_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lock_waits, "LONGEST_WAIT", 30.0)
    (tmp_path / "lock").touch()
    compiler = fork.Process(target=_release, args=(tmp_path / "lock",))
    compiler.start()
    with bounded_lock_waits():
        FileBaton(str(tmp_path / "lock")).wait()
        with FileLock(tmp_path / "another"):
            pass
    compiler.join()


def _release(lock: Path) -> None:
    time.sleep(0.3)
    lock.unlink()


def _hold(lock: Path, held: object) -> None:
    with FileLock(lock):
        held.set()  # type: ignore[attr-defined]
        time.sleep(60)


def test_a_lock_of_a_process_that_hangs_is_not_waited_for(tmp_path: Path, caplog) -> None:
    held = fork.Event()
    holder = fork.Process(target=_hold, args=(tmp_path / "lock", held))
    holder.start()
    held.wait(30)
    try:
        lock = FileLock(tmp_path / "lock")
        with bounded_lock_waits():
            with pytest.raises(StageFailed, match=f"{tmp_path}/lock: another process has held"):
                lock.acquire()
            with pytest.raises(Timeout):  # a library's own deadline is kept
                lock.acquire(timeout=0.05)
            with pytest.raises(Timeout):
                lock.acquire(blocking=False)
        with pytest.raises(Timeout):
            lock.acquire(timeout=0.05)
        assert f"waiting for {tmp_path}/lock" in caplog.text
    finally:
        holder.kill()
        holder.join()
