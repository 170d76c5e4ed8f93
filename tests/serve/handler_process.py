"""An archive's handler, run as TorchServe's worker does, in a process without this toolkit."""

import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from compress.common.errors import StageFailed
from compress.common.signature import Signature
from compress.serve.torchserve.mar_file import unpacked
from compress.serve.torchserve.process import log_tail
from compress.serve.worker.wire import from_npz, to_npz
from tests.serve import handler_runner_main

HANDLER_SECONDS = 120.0  # time limit of loading a handler's model, and of one response


class HandlerProcess:
    """Runs the handler as TorchServe's worker does; in the `with` block, its probe has passed."""

    def __init__(self, members: Mapping[str, bytes], signature: Signature) -> None:
        self._members = members
        self._signature = signature
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Unpack the archive, start the process and load the model; StageFailed where it fails."""
        with self._stack:
            model = self._stack.enter_context(unpacked(self._members))
            self._folder, script = model.parent, str(handler_runner_main.__file__)
            with (self._folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-I", script, str(model)],
                    cwd=self._folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            # Callbacks run in reverse: the pipes are closed, the process killed, then waited for.
            self._stack.callback(process.wait)
            self._stack.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            self._requests, self._answers = process.stdin, process.stdout
            # Of buffered bytes that an ended process cannot read.
            self._stack.enter_context(suppress(BrokenPipeError))
            self._stack.enter_context(self._requests)
            self._stack.enter_context(self._answers)
            self._receive()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def predict(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
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

    def _receive(self) -> bytes:
        ready, _, _ = select.select([self._answers], [], [], HANDLER_SECONDS)
        sizes = self._answers.read(16) if ready else b""
        if len(sizes) < 16:
            log = (self._folder / "log").read_text(errors="replace")
            what = "ended" if ready else f"did not answer within {HANDLER_SECONDS:g} s"
            shown = log_tail(log.replace(f"{self._folder}/", ""))
            raise StageFailed(f"the handler's process {what}; its log ends: {shown}")
        length, status = (int.from_bytes(sizes[i : i + 8], "big") for i in (0, 8))
        body = self._answers.read(length)
        if status != 200:
            raise StageFailed(f"the handler answered {status}: {json.loads(body)['message']}")
        return body
