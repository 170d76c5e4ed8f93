"""Reads foreign files in a child process: they may ask for any memory, never end, or crash it."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from compress.common.errors import ArtifactInvalid, CompressError, describe_exit_code
from compress.common.process import end_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")

MEMORY = 2**30  # bytes that a child may take besides those for the file's content
COPIES = 8
"""How often a file's bytes may be in memory: parsed, converted, in a runtime and written again."""
COPIES_OF_INPUTS = 512
"""How often the inputs of a call may be: a network's first layers have many more channels. One that
hears nine seconds of sound at 16 kHz takes 1.4 GiB for three, which are 1.7 MB."""
SECONDS, SECONDS_PER_GIB = 15, 100
"""Processor time that a child may take, and more for each GiB of the file."""
LONGEST = 15
"""How much longer than its processor time it may take, on a busy machine or a slow disk."""
SECONDS_BETWEEN_LOOKS = 0.01
_is_child = False


def read_in_child(name: str, read: Callable[[], T], *stored: Path, inputs: int = 0) -> T:
    """Return what a function returns in a forked process, within limits of memory and time.

    It raises what the function raises. Nothing else of it reaches this process: no log, no output,
    no imported module. The limits follow from the size of the `stored` files, or folders of files,
    and the bytes of the `inputs` with which a model is called. The result must be small, as it is
    pickled.

    Raises:
        ArtifactInvalid: it takes more memory or time than files of this size explain, is nested too
            deeply, or ends the process; the message begins with `name`.
    """
    if _is_child or sys.platform != "linux":  # elsewhere a process's memory is read in other ways
        return read()
    size = sum(map(stored_bytes, stored))
    memory = MEMORY + COPIES * size + COPIES_OF_INPUTS * inputs
    memory = min(memory, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4)
    seconds = SECONDS + SECONDS_PER_GIB * size // 2**30
    ours, theirs = Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        # As in torch's DataLoader: the child computes with one thread.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if not child:
        _run(name, read, theirs, seconds, parent)
    theirs.close()
    problem = ""
    result: tuple[T, BaseException | None] | None = None
    try:
        before, deadline = _private_bytes(child), time.monotonic() + LONGEST * seconds
        while not ours.poll(SECONDS_BETWEEN_LOOKS):
            if _private_bytes(child) - before > memory:
                problem = f"takes more than {memory / 2**30:.2g} GiB of memory"
            elif time.monotonic() > deadline:
                problem = f"takes more than {LONGEST * seconds} s"
            if problem:
                break
        else:
            with suppress(EOFError):
                result = ours.recv()
    finally:
        ours.close()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # has no effect on one that has ended
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if result is None:
        if code == -signal.SIGXCPU:
            problem = f"takes more than {seconds} s of processor time"
        problem = problem or f"ends the process that does it, which {describe_exit_code(code)}"
        raise ArtifactInvalid(f"{name}: reading its {size} bytes {problem}; it is refused")
    value, error = result
    if error is not None:
        raise error
    return value


def stored_bytes(path: Path) -> int:
    """Return the bytes of a file, or of the files in a folder, without holes."""
    # Not by st_blocks, which ZFS sets seconds after a write, and some network file systems never.
    size = 0
    for file in filter(Path.is_file, path.iterdir() if path.is_dir() else (path,)):
        end = 0
        with suppress(OSError), file.open("rb", buffering=0) as stream:
            while True:  # until no data follow, which is an error
                start = stream.seek(end, os.SEEK_DATA)
                end = stream.seek(start, os.SEEK_HOLE)
                size += end - start
    return size


def _run(
    name: str, read: Callable[[], object], answers: Connection, seconds: int, parent: int
) -> None:
    """Send a function's result and error, and end this process."""
    global _is_child
    try:
        _is_child = True
        os.setpgid(0, 0)  # Ctrl-C reaches the parent, which ends this process
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            return
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # the first to be ended where memory runs out
            Path("/proc/self/oom_score_adj").write_text("1000")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.stdout = sys.stderr = os.fdopen(null, "w")
        faulthandler.disable()
        logging.disable()
        gc.freeze()  # or a collection would copy the parent's objects
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the others are not in a fork, which would wait for them
        value: object = None
        error: BaseException | None = None
        try:
            value = read()
        except RecursionError:
            error = ArtifactInvalid(f"{name}: is nested too deeply")
        except MemoryError:
            error = ArtifactInvalid(f"{name}: asks for more memory than there is")
        except BaseException as raised:  # noqa: BLE001 - raised in the parent
            if not isinstance(raised, CompressError):
                raised.add_note(traceback.format_exc())
            error = raised
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - its class takes other arguments than it keeps
            error = RuntimeError(f"{type(error).__name__}: {error}")
        answers.send((value, error))
    finally:
        os._exit(0)


def _private_bytes(process: int) -> int:
    """Return a process's resident memory without that of files; 0 for one that has ended."""
    with suppress(OSError):
        _, resident, shared, *_ = Path(f"/proc/{process}/statm").read_text().split()
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0
