"""The most memory that a process needs to open a model and answer a call.

It is measured in a process that does nothing else. Where a model was opened before, the heap has
room already, and the next one that takes it would seem to need none. Importing torch anew for each
model takes seconds, however; so one process imports it, computes nothing, and forks another for
each question (:mod:`compress.profiling.peak_memory_worker`). multiprocessing's own fork server
would import
the user's script as well.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.errors import StageFailed
from compress.profiling.rss import PROCESS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from compress.artifacts.artifact import Artifact

COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from compress.profiling.peak_memory_worker import answer; answer(int(sys.argv[2]))"
)


class MeasurementRequest(NamedTuple):
    """What memory is asked for."""

    module: str
    """Where the artifact's class is defined."""
    name: str
    path: str
    device: str
    threads: int
    inputs: str
    """File of what the model is asked."""
    imports: tuple[str, ...]
    """Modules that are known to be imported."""
    folder: str
    """Where the asker is now, which may have changed since the process was started."""
    search: list[str]
    """Where it looks for modules."""
    environment: dict[str, str]


def peak_memory(
    artifact: Artifact, device: str, threads: int, batches: Sequence[tuple[torch.Tensor, ...]]
) -> float:
    """Return the mebibytes that a process needs at most to open an artifact and answer calls.

    Counted is what is resident beyond a process that has imported the same libraries, with
    neither their code nor their modules. On a CUDA device it is what torch allocates there.

    Args:
        artifact: the artifact.
        device: where it is opened.
        threads: CPU threads that it answers with.
        batches: what it is asked, one after the other; they are not counted themselves.

    Raises:
        StageFailed: it cannot be measured; the message says why.
    """
    kind = type(artifact)
    why = artifact.memory_unavailable_reason
    if not (PROCESS / "clear_refs").exists():
        why = "this system does not tell the peak of a process (Linux does)"
    elif kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        why = f"another process cannot import {kind.__name__}; define it in a module"
    if why:
        raise StageFailed(f"peak memory cannot be measured: {why}")
    import torch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "inputs.pt"
        torch.save(batches, file)
        found = _asked(_question(artifact, device, threads, file))
    if "error" in found:
        raise StageFailed(f"peak memory cannot be measured: {found['error']}")
    return float(found["mebibytes"])


def _question(artifact: Artifact, device: str, threads: int, inputs: Path) -> MeasurementRequest:
    kind = type(artifact)
    return MeasurementRequest(
        module=kind.__module__,
        name=kind.__qualname__,
        path=str(artifact.path.absolute()),
        device=device,
        threads=threads,
        inputs=str(inputs),
        imports=kind.opened_with,
        folder=_folder(),
        search=_search(),
        environment=dict(os.environ),
    )


@contextmanager
def measurement_process() -> Iterator[None]:
    """End the process that measures, where one was started, after the outermost of such blocks.

    Outside of any it ends with this process.
    """
    global _blocks
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        if not _blocks:
            _end()


class _Measurer:
    """The process that forks others; it ends when this one does, however that ends."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                COMMAND,
                json.dumps(_search()),
                str(theirs.fileno()),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C of the terminal ends it through us
        )
        theirs.close()

    def ask(self, question: MeasurementRequest) -> dict[str, Any]:
        self.connection.send_bytes(json.dumps(question).encode())
        found: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return found

    def end(self) -> None:
        """Kill the process; what it has forked dies with it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


def _folder() -> str:
    with suppress(FileNotFoundError):
        return str(Path.cwd())
    return ""  # it was removed


def _search() -> list[str]:
    return [*map(str, sys.path)]


_measurer: _Measurer | None = None
_one_at_a_time = threading.Lock()
_blocks = 0


def _asked(question: MeasurementRequest) -> dict[str, Any]:
    global _measurer
    with _one_at_a_time:
        try:
            _measurer = _measurer or _Measurer()
            return _measurer.ask(question)
        except (EOFError, OSError) as error:
            _end()
            return {"error": f"the process that measures it has ended ({type(error).__name__})"}
        except BaseException:
            _end()  # an answer that nobody waits for would be taken for the next one's
            raise


def _end() -> None:
    global _measurer
    if _measurer is not None:
        ended, _measurer = _measurer, None
        ended.end()


def _forget() -> None:
    """Leave the process to the one that started it, of which this one is a fork."""
    global _measurer, _one_at_a_time
    if _measurer is not None:
        _measurer.connection.close()
        _measurer.process.returncode = 0  # or it would be waited for
        _measurer = None
    _one_at_a_time = threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
