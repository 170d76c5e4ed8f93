"""The measuring process of :mod:`compress.profiling.peak_memory`: forks once for each request."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import CompressError, StageFailed, describe_exit_code, first_line
from compress.common.factories import is_library
from compress.common.malloc import release_memory
from compress.common.process import end_with_parent, import_modules
from compress.profiling.rss import (
    PROCESS,
    MeasurementRequest,
    library_kib,
    memory_kib,
    reset_peak,
)

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact

LONGEST_SECONDS = 600  # how long a model may take to be opened and to answer: the fork may hang
IMPORT_ROUNDS = 3
"""Measurements of one request at most, each after importing what the one before imported."""
MEASURED_SECONDS = 0.5
"""For which a model is called, and on until a call takes no more memory than those before: what it
takes may depend on the values of its inputs."""
STEADY = 1.01
"""Ratio of two peaks that counts as none: the heap grows by single pages all the while."""


def serve_requests(descriptor: int) -> None:
    """Measure for one request after the other until the client closes the connection."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a model prints, the run has printed
    warnings.simplefilter("ignore")
    client, tried = Connection(descriptor), set[str]()
    with suppress(EOFError, OSError):
        while True:
            request = MeasurementRequest(*json.loads(client.recv_bytes()))
            # The client's working directory, modules and variables of now, not of when it began.
            with suppress(OSError):  # it was removed: the model fails itself if it uses it
                os.chdir(request.folder)
            sys.path[:] = request.search
            os.environ.clear()
            os.environ.update(request.environment)
            tempfile.tempdir = None  # cached: read TMPDIR again
            import_modules(request.imports)
            for round_ in range(IMPORT_ROUNDS):
                gc.freeze()  # or garbage collection in each fork would traverse all of torch
                # A measurement that imports is going to be made again: it ends after a call.
                known = None if round_ == IMPORT_ROUNDS - 1 else tried
                result = _measure_in_fork(request, client, known)
                missing = [name for name in result.pop("imported", ()) if name not in tried]
                if not missing:
                    break
                # Imported here, and the model is measured again: modules are no part of its memory,
                # and the next model need not import them.
                import_modules(missing)
                tried |= {*missing}
            client.send_bytes(json.dumps(result).encode())
    os._exit(0)  # skip the interpreter's teardown: nothing is left to clean up


def _measure_in_fork(
    request: MeasurementRequest, client: Connection, known: set[str] | None
) -> dict[str, Any]:
    """Return the reply of a new process; raise EOFError if the client closes the connection."""
    ours, theirs = Pipe(duplex=False)
    parent, child = os.getpid(), os.fork()
    if not child:
        client.close()
        os.setpgid(0, 0)
        # It ends with its parent, which may be gone already, and before others if memory runs out.
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        with suppress(OSError):
            (PROCESS / "oom_score_adj").write_text("1000")
        theirs.send_bytes(json.dumps(_try_to_measure(request, known)).encode())
        os._exit(0)
    theirs.close()
    result: dict[str, Any] = {}
    try:
        ready = wait([ours, client], LONGEST_SECONDS)
        if client in ready:
            raise EOFError
        if not ready:
            result = {"error": f"it was not opened and did not answer within {LONGEST_SECONDS} s"}
        else:
            with suppress(EOFError):
                result = json.loads(ours.recv_bytes())
    finally:
        ours.close()
        for kill in (os.kill, os.killpg):  # itself, and what it started
            with suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)  # has no effect on one that has ended
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return result or {"error": f"the process that opened it {describe_exit_code(code)}"}


def _try_to_measure(request: MeasurementRequest, known: set[str] | None) -> dict[str, Any]:
    """Return the memory or the error, and the libraries that were imported meanwhile."""
    before = {*sys.modules}

    def imported() -> list[str]:
        return [name for name in [*sys.modules] if name not in before and is_library(name)]

    def is_unknown() -> bool:  # then the memory is that of one call
        return known is not None and not known.issuperset(imported())

    try:
        result: dict[str, Any] = {"mebibytes": _measure(request, is_unknown)}
    except CompressError as error:
        result = {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - a model of the user's may raise any
        result = {"error": f"{type(error).__name__}: {first_line(error)}"}
    return {**result, "imported": imported()}


def _measure(request: MeasurementRequest, stops: Callable[[], bool]) -> float:
    """Return MiB at the peak of opening the model and calling it, until it `stops`."""
    module = importlib.import_module(request.module)
    kind: type[Artifact] = functools.reduce(getattr, request.name.split("."), module)  # type: ignore[assignment]
    artifact = kind.from_directory(request.path)
    hashed = {*map(tuple, request.hashed)}
    artifact.note_hashed({v: n for v, n in artifact.file_versions().items() if v in hashed})
    batches = torch.load(request.inputs, weights_only=True)
    device, already = artifact.runs_on(request.device), 0
    on_device = device.startswith("cuda")
    if on_device:
        # Creates the context and cuBLAS's workspace (32 MiB on a Hopper), which are no part of a
        # model.
        square = torch.zeros(16, 16, device=device)
        torch.addmm(square, square, square @ square)
        del square
        already = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    libraries = library_kib()
    release_memory()
    reset_peak()
    before = memory_kib("VmRSS")
    with artifact.open(request.device, request.threads) as predict:
        growth, began = 0, time.monotonic()
        # The largest inputs first, as they take most.
        for inputs in sorted(batches, key=lambda batch: -sum(x.nbytes for x in batch)):
            predict(*inputs)
            peak = memory_kib("VmHWM") - before
            is_steady, growth = peak <= STEADY * growth, peak
            is_late = time.monotonic() > began + MEASURED_SECONDS
            if (is_late and is_steady) or stops():
                break
        if on_device:
            if allocated := torch.cuda.max_memory_allocated(device) - already:
                return allocated / 2**20
            raise StageFailed("its runtime takes memory of the GPU, which PyTorch does not count")
        # A library's file is read as it is used; its pages are shared, and no part of a model.
        library_growth = sum(kib - libraries.get(file, kib) for file, kib in library_kib().items())
    return max(0, growth - library_growth) / 1024
