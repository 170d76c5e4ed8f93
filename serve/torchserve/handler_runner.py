"""Run an archive's handler in a process of its own, where TorchServe cannot be started."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from compress.common.errors import StageFailed
from compress.serve.torchserve import handler_runner_main
from compress.serve.torchserve.process import log_tail
from compress.serve.worker.wire import from_npz, to_npz

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.common.signature import Signature
    from compress.serve.worker.tensors import Array

SECONDS = 120.0
"""Time limit of loading, and of one response."""


class HandlerProcess:
    """Runs the handler as TorchServe's worker does; in the `with` block, its probe has passed."""

    def __init__(self, members: Mapping[str, bytes], signature: Signature) -> None:
        """Set the archive's members; `__enter__` unpacks them."""
        self._members = members
        self._signature = signature
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Unpack the archive, start the process and load the model; StageFailed where it fails."""
        with self._stack:
            self._folder = Path(tempfile.mkdtemp(prefix="handler-"))
            self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for name, content in self._members.items():
                file = self._folder / "model" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            self._start()
            self._receive()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def predict(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Return the outputs in the signature's order; StageFailed for an error of the handler."""
        names = (spec.name for spec in self._signature.inputs)
        body = to_npz(dict(zip(names, inputs, strict=True)))
        try:
            self._requests.write(len(body).to_bytes(8, "big") + body)
            self._requests.flush()
        except BrokenPipeError:
            pass  # _receive raises with the end of the process's log
        answer = from_npz(self._receive())
        return tuple(answer[output.name] for output in self._signature.outputs)

    def _start(self) -> None:
        command = [
            sys.executable,
            "-I",
            str(handler_runner_main.__file__),
            str(self._folder / "model"),
        ]
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        # Callbacks run in reverse: the pipes are closed, the process killed, then waited for.
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests = process.stdin
        # Of buffered bytes that an ended process cannot read.
        self._stack.enter_context(suppress(BrokenPipeError))
        self._stack.enter_context(process.stdin)
        self._answers = self._stack.enter_context(process.stdout)

    def _receive(self) -> bytes:
        ready, _, _ = select.select([self._answers], [], [], SECONDS)
        sizes = self._answers.read(16) if ready else b""
        if len(sizes) < 16:
            log = (self._folder / "log").read_text(errors="replace")
            what = "ended" if ready else f"did not answer within {SECONDS:g} s"
            shown = log_tail(log.replace(f"{self._folder}/", ""))
            raise StageFailed(f"the handler's process {what}; its log ends: {shown}")
        length, status = (int.from_bytes(sizes[i : i + 8], "big") for i in (0, 8))
        body = self._answers.read(length)
        if status != 200:
            raise StageFailed(f"the handler answered {status}: {json.loads(body)['message']}")
        return body
