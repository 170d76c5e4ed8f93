"""Devices whose far end runs ONNX files in another process, which is started once and kept."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import tempfile
import threading
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed, describe_exit_code
from compress.common.lazy_modules import torch
from compress.core.devices import Device
from compress.export.common.remote_session import pack, read_frame, unpack, write_frame

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor

DEADLINE_S = 600.0
"""Longest wait for one answer: to opening a file, or to one batch."""


class FarEnd:
    """A process that answers frames on pipes, as :func:`remote_session.serve` does.

    It ends with this process, whose end closes its standard input.
    """

    def __init__(self, title: str, command: Sequence[str], env: dict[str, str] | None = None):
        self._title, self._log = title, tempfile.TemporaryFile()  # noqa: SIM115 - kept open
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )
        self.stdin: Any = self.process.stdin
        self.stdout: Any = self.process.stdout

    def exchange(self, frame: bytes, deadline_s: float) -> bytes:
        """Return the answer to a frame; raise StageFailed where the process ends, or is late."""
        reply = None
        timer = threading.Timer(deadline_s, self.process.kill)
        timer.start()
        try:
            with suppress(BrokenPipeError, EOFError):  # it has ended
                reply = self.answer(frame)
        finally:
            timer.cancel()  # or Ctrl-C would leave this process waiting for it
        if reply is not None:
            return reply
        self._log.seek(0)
        *_, last = "", *self._log.read().decode(errors="replace").splitlines()
        ended = describe_exit_code(self.process.wait(deadline_s))
        raise StageFailed(f"{self._title}: {ended}, or took over {deadline_s:g} s; {last}")

    def answer(self, frame: bytes) -> bytes | None:
        """Return the answer; None, BrokenPipeError or EOFError where the process has ended."""
        write_frame(self.stdin, frame)
        return read_frame(self.stdout)

    def close(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError), self.process:  # which closes its pipes and waits for it
            self._log.close()


class RemoteDevice(Device):
    """A device that opens ONNX files in another process, one for all files of a run."""

    kinds = frozenset({"onnx"})

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._far_end: FarEnd | None = None

    @abstractmethod
    def start(self) -> FarEnd:
        """Start the process; raise Unavailable where something that it takes is missing."""

    def open(self, artifact: Artifact, threads: int) -> AbstractContextManager[Predictor]:
        """Open an artifact's file as onnxruntime does by default."""
        # The graph comes first, before the weights that a large one has beside it.
        names = sorted(artifact.model_files, key=lambda name: name != artifact.payload_name)
        return self.open_files([artifact.path / name for name in names], threads)

    @contextmanager
    def open_files(
        self, files: Sequence[Path], threads: int, *, optimized: bool = True
    ) -> Iterator[Predictor]:
        """Open a graph's file and those of its weights, on request without rewriting the graph."""
        session = uuid.uuid4().hex

        def ask(do: str, arrays: Sequence[Any] = (), **more: Any) -> list[Any]:
            return self._ask({"do": do, "session": session, **more}, arrays)

        def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(map(torch.from_numpy, ask("run", [x.cpu().numpy() for x in inputs])))

        paths = [str(file.absolute()) for file in files]
        ask("open", files=paths, threads=threads, optimized=optimized)
        try:
            yield predict
        finally:
            with suppress(StageFailed):  # the process has ended
                ask("close")

    def _ask(self, header: dict[str, Any], arrays: Sequence[Any]) -> list[Any]:
        with self._lock:
            if self._far_end is None:
                if header["do"] == "close":
                    return []
                self._far_end = self.start()
                atexit.register(self.close)
            try:
                reply, outputs = unpack(self._far_end.exchange(pack(header, arrays), DEADLINE_S))
            except BaseException:
                self.close()
                raise
        if "error" in reply:
            raise StageFailed(f"does not run on {self.title}: {reply['error']}")
        return outputs

    def close(self) -> None:
        """End the process; the next call starts another."""
        atexit.unregister(self.close)
        far_end, self._far_end = self._far_end, None
        if far_end is not None:
            far_end.close()
