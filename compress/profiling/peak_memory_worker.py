"""What the process does that measures memory; :mod:`compress.profiling.peak_memory` starts it."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import warnings
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import CompressError, describe_exit_code, first_line
from compress.common.factories import is_library
from compress.common.process import gc_disabled
from compress.profiling.peak_memory import Question
from compress.profiling.rss import PROCESS, forget_peak, give_back, kibibytes, library_kibibytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.artifacts.artifact import Artifact

LONGEST_SECONDS = 600
"""How long a model may take to be opened and to answer: what was forked may hang."""
REHEARSALS = 3
PR_SET_PDEATHSIG = 1


def answer(descriptor: int) -> None:
    """Answer one question after the other until nobody is there to ask.

    What a model was seen to import is imported here, and it is asked again: modules are no part of
    its memory, and the next model need not import them.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a model prints, the run has printed
    warnings.simplefilter("ignore")
    asked_by, tried = Connection(descriptor), set[str]()
    with suppress(EOFError, OSError):
        while True:
            question = Question(*json.loads(asked_by.recv_bytes()))
            _surround_as(question)
            _import(question.imports)
            for _ in range(REHEARSALS):
                gc.freeze()  # or each fork would look through all that torch is
                found = _of_a_fork(question, asked_by)
                missing = [name for name in found.pop("imported", ()) if name not in tried]
                if not missing:
                    break
                _import(missing)
                tried |= {*missing}
            asked_by.send_bytes(json.dumps(found).encode())
    os._exit(0)  # nothing is left to be taken apart


def _surround_as(question: Question) -> None:
    """Be where the asker is, and have its environment: it may have changed since the last time."""
    with suppress(OSError):  # a folder that is gone is missed by whoever uses it
        os.chdir(question.folder)
    sys.path[:] = question.search
    os.environ.clear()
    os.environ.update(question.environment)
    tempfile.tempdir = None  # or it stays where the first one was


def _import(modules: Sequence[str]) -> None:
    with gc_disabled():
        for name in modules:
            with suppress(Exception, SystemExit):
                importlib.import_module(name)


def _of_a_fork(question: Question, asked_by: Connection) -> dict[str, Any]:
    """Return what a new process finds, which does nothing else.

    Raises:
        EOFError: whoever asked has gone.
    """
    ours, theirs = Pipe(duplex=False)
    parent, child = os.getpid(), os.fork()
    if not child:
        asked_by.close()
        _die_with(parent)
        theirs.send_bytes(json.dumps(_found(question)).encode())
        os._exit(0)
    theirs.close()
    found: dict[str, Any] = {}
    try:
        ready = wait([ours, asked_by], LONGEST_SECONDS)
        if asked_by in ready:
            raise EOFError
        if not ready:
            found = {"error": f"it was not opened and did not answer within {LONGEST_SECONDS} s"}
        else:
            with suppress(EOFError):
                found = json.loads(ours.recv_bytes())
    finally:
        ours.close()
        code = _ended(child)
    return found or {"error": f"the process that opened it {describe_exit_code(code)}"}


def _ended(child: int) -> int:
    """End a process and what it has started; return its exit code, negative for a signal."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)  # no matter to one that has ended
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_with(parent: int) -> None:
    """Let this process end with its parent, and before any other where memory runs out."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError):
        (PROCESS / "oom_score_adj").write_text("1000")


def _found(question: Question) -> dict[str, Any]:
    """Return the memory or what went wrong, and the libraries that were imported for it."""
    before = {*sys.modules}
    try:
        found: dict[str, Any] = {"mebibytes": _measured(question)}
    except CompressError as error:
        found = {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - a model of the user's may raise any
        found = {"error": f"{type(error).__name__}: {first_line(error)}"}
    imported = [name for name in [*sys.modules] if name not in before and is_library(name)]
    return {**found, "imported": imported}


def _measured(question: Question) -> float:
    home = importlib.import_module(question.module)
    kind: type[Artifact] = functools.reduce(getattr, question.name.split("."), home)  # type: ignore[assignment]
    artifact = kind.from_directory(question.path)
    batches = torch.load(question.inputs, weights_only=True)
    on_device = _begun(question.device)
    libraries = library_kibibytes()
    give_back()
    forget_peak()
    before = kibibytes("VmRSS")
    with artifact.open(question.device, question.threads) as predict:
        for inputs in batches:
            predict(*inputs)
        grown = kibibytes("VmHWM") - before
        if on_device and (allocated := torch.cuda.max_memory_allocated(question.device)):
            return allocated / 2**20
        # Of a library each process reads what it uses; it is shared, and no part of a model.
        read = {file: now - libraries.get(file, now) for file, now in library_kibibytes().items()}
    return max(0, grown - sum(read.values())) / 1024


def _begun(device: str) -> bool:
    """Begin to count on a CUDA device, whose context is no part of a model; False on the CPU."""
    if not device.startswith("cuda"):
        return False
    torch.zeros(1, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    return True
