"""Peak memory of opening a model and calling it, measured in a process of its own."""

# Where another model was opened before, the heap has free space, and the next model that fills it
# would seem to need no memory. Importing torch anew for each model takes seconds, so one process
# imports it, computes nothing, and forks another for each measurement (peak_memory_worker). That
# process is a fork of this one where this one has not computed yet (`fork_worker`), else a new one.
# multiprocessing's own fork server would import the user's script as well.

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.lazy_modules import torch
from compress.common.malloc import keeps_freed_memory
from compress.profiling.rss import PROCESS, MeasurementRequest

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact

COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from compress.profiling.peak_memory_worker import serve_requests; "
    "serve_requests(int(sys.argv[2]))"
)


def require_measurable(artifact: Artifact) -> None:
    """Raise StageFailed, with the reason, where an artifact's peak memory cannot be measured."""
    kind = type(artifact)
    reason = artifact.memory_unavailable_reason
    if not (PROCESS / "clear_refs").exists():
        reason = "this system does not report the peak of a process (Linux does)"
    elif kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        reason = f"another process cannot import {kind.__name__}; define it in a module"
    if reason:
        raise StageFailed(f"peak memory cannot be measured: {reason}")


def peak_memory(
    artifact: Artifact, device: str, threads: int, batches: Sequence[tuple[torch.Tensor, ...]]
) -> float:
    """Measure the peak memory of a process that opens an artifact and calls it, in MiB.

    Counted is resident memory beyond that of a process which has imported the same libraries, with
    neither their code nor their modules nor the inputs. On a CUDA device it is what torch allocates
    there, without cuBLAS's workspace. StageFailed is raised, with the reason, where it cannot be
    measured.
    """
    require_measurable(artifact)
    kind = type(artifact)
    working_directory, hashed = "", list[list[str | int]]()
    with suppress(FileNotFoundError):
        working_directory = str(Path.cwd())
    with suppress(ArtifactInvalid):  # the measuring process says so
        hashed = [[*version] for version in artifact.hashed_versions()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inputs.pt"
        torch.save(batches, file)
        reply = _send(
            MeasurementRequest(
                module=kind.__module__,
                name=kind.__qualname__,
                path=str(artifact.path.absolute()),
                device=device,
                threads=threads,
                inputs=str(file),
                hashed=hashed,
                imports=artifact.modules_to_open(),
                folder=working_directory,
                search=[*map(str, sys.path)],
                environment=dict(os.environ),
            )
        )
    if "error" in reply:
        raise StageFailed(f"peak memory cannot be measured: {reply['error']}")
    return float(reply["mebibytes"])


@contextmanager
def measurement_process() -> Iterator[None]:
    """Keep one measuring process in nested blocks; outside of them it ends with this process."""
    global _open_blocks
    _open_blocks += 1
    try:
        yield
    finally:
        _open_blocks -= 1
        if not _open_blocks:
            _end_worker()


def fork_worker() -> None:
    """Fork the measuring process from this one, which has imported torch and computed nothing.

    That saves importing a second time. Without effect where a fork is not safe: beside other
    threads of Python, whose locks would never be released in it; where the allocator is set, which
    a fork inherits; nor within another block of :func:`measurement_process`, whose process has done
    other things before.
    """
    global _worker
    if (
        _open_blocks > 1
        or keeps_freed_memory()
        or threading.active_count() > 1
        or not (PROCESS / "clear_refs").exists()
    ):
        return
    with _lock, warnings.catch_warnings():
        # Threads that libraries start at import, such as OpenBLAS's, are idle here.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        _worker = _worker or _Worker(is_fork=True)


class _Worker:
    """The process that forks one process per request; it ends with this one, even by a signal."""

    def __init__(self, *, is_fork: bool = False) -> None:
        self.is_fork = is_fork
        self.connection, theirs = Pipe()
        self.process: subprocess.Popen[bytes] | None = None
        if is_fork:
            self.pid = os.fork()
            if not self.pid:
                _serve_in_fork(theirs.fileno())
        else:
            search = json.dumps([*map(str, sys.path)])
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, search, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must not reach it: this process ends it
            )
            self.pid = self.process.pid
        theirs.close()

    def end(self) -> None:
        """Kill it and its forks."""
        for kill in (os.killpg, os.kill):  # a fork may not lead a group yet
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        else:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        self.connection.close()


def _serve_in_fork(descriptor: int) -> None:
    """Serve requests in a fork of this process; never return."""
    try:
        os.setsid()  # Ctrl-C must not reach it: the parent ends it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # The parent's locks, files and sockets are not to stay open here.
        os.closerange(3, descriptor)
        os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        sys.stdout = os.fdopen(os.dup(null), "w")
        from compress.profiling.peak_memory_worker import serve_requests

        serve_requests(descriptor)
    finally:
        os._exit(1)


_worker: _Worker | None = None
_lock = threading.Lock()
_open_blocks = 0


def _send(request: MeasurementRequest) -> dict[str, Any]:
    """Return the worker's reply: ``mebibytes`` or ``error``."""
    global _worker
    with _lock:
        if _worker is not None and _worker.is_fork and request.device.startswith("cuda"):
            _end_worker()  # CUDA cannot be used in a fork of a process that has initialized it
        try:
            _worker = _worker or _Worker()
            _worker.connection.send_bytes(json.dumps(request).encode())
            return dict(json.loads(_worker.connection.recv_bytes()))
        except (EOFError, OSError) as error:
            _end_worker()
            return {"error": f"the process that measures it has ended ({type(error).__name__})"}
        except BaseException:
            _end_worker()  # or the pending reply would be read as that of the next request
            raise


def _end_worker() -> None:
    global _worker
    if _worker is not None:
        worker, _worker = _worker, None
        worker.end()


def _leave_to_parent() -> None:
    """In a fork of this process: let go of the worker, which belongs to the parent."""
    global _worker, _lock
    if _worker is not None:
        _worker.connection.close()
        if _worker.process is not None:
            _worker.process.returncode = 0  # or Popen would wait for it
        _worker = None
    _lock = threading.Lock()


atexit.register(_end_worker)
os.register_at_fork(after_in_child=_leave_to_parent)
