"""New processes without the time that imports take: forked where these were done, once.

`Forks` makes processes that have torch and nothing of ours, `Commands` those of `compress`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

SERVER = """
import atexit, gc, json, os, runpy, sys, traceback
gc.disable()
exec(sys.argv.pop())
gc.freeze()
gc.enable()
print("ready", flush=True)
for line in sys.stdin:
    script, folder, *streams = json.loads(line)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(folder)
            for number, stream in enumerate(streams, 1):
                os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            runpy.run_path(script, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        atexit._run_exitfuncs()  # such as those that remove temporary folders
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


TORCH = "import torch, torch._dynamo, torch.export.pt2_archive._package"


class Forks:
    """A process that has imported torch, or something else, and forks for each script."""

    SERVER = SERVER

    def __init__(self, imports: str = TORCH) -> None:
        # What is imported is found as from anywhere else, not because of where the tests began.
        self._server = subprocess.Popen(
            [sys.executable, "-c", self.SERVER, imports],
            cwd=os.sep,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._answer() == "ready"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.communicate()

    def run(self, code: str, folder: Path) -> str:
        """Run code in a folder and return what it printed."""
        script, *streams = (folder / f"forked.{end}" for end in ("py", "out", "err"))
        script.write_text(code)
        self._send([str(script), str(folder), *map(str, streams)])
        output, errors = streams
        assert self._answer() == "0", errors.read_text()
        return output.read_text().strip()

    def _send(self, order: object) -> None:
        assert self._server.stdin is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()


COMMAND_SERVER = """
import gc, json, os, signal, sys
gc.disable()
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as launched ranks do before they import torch
from compress import cli
import compress.pipelines.commands.check, compress.pipelines.reporting.html
import compress.pipelines.commands.verify
import compress.pipelines.config.pipeline, compress.pipelines.runner.run
import compress.training.stage, compress.training.launch.rank_group
import compress.graph.torch_export, compress.pruning.prune_channels
import compress.export.onnx.stage, onnxscript, torch.onnx
# Half of the time of a small run.
import compress.pipelines.api, compress.pipelines.reporting.terminal_table
import compress.training.fit, compress.training.loop.trainer, compress.pruning.channel_pruner
import onnxscript.function_libs.torch_lib.ops, torch.export._trace, sympy.tensor.tensor
from compress.pipelines.system.templates import _environment

for template in _environment(True).list_templates():
    _environment(template.endswith(".html.jinja")).get_template(template)

assert "onnxruntime" not in sys.modules, "a fork lacks its threads, and would wait for them"
gc.freeze()
gc.enable()
print("ready", flush=True)
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
# Else watchers that have ended stay as zombies; were they ignored, no time would be counted.
signal.signal(signal.SIGCHLD, reap)
for line in sys.stdin:
    order = json.loads(line)
    if watcher := os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    status = open(order["status"], "w", buffering=1)
    streams = [os.open(stream, os.O_WRONLY) for stream in order["streams"]]
    if child := os.fork():
        for stream in (*streams, 0, 1):
            os.close(stream)
        print(child, file=status)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=status)
        os._exit(0)
    break
else:
    os._exit(0)
# From here on a process like any other, to its very end.
status.close()
os.setsid()
for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
    os.dup2(stream, number)
    os.close(stream)
sys.stdin = open(0, closefd=False)
sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
os.environ.clear()
os.environ.update(order["environment"])
sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
os.chdir(order["folder"])
sys.argv = ["compress", *order["arguments"]]
exec(order["first"])
cli.main()
"""


class Command:
    """A process of the command; what `subprocess.Popen` has that tests use."""

    def __init__(self, status: IO[str], stdout: IO[str], stderr: IO[str]) -> None:
        self.pid = int(status.readline())
        self.stdout, self.stderr = stdout, stderr
        self._status = status
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what is left of the output and of the errors, once the process has ended."""
        texts = ["", ""]

        def read(index: int, stream: IO[str]) -> None:
            with stream:
                texts[index] = stream.read()

        readers = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired("compress", timeout)
        with self._status:
            self.returncode = int(self._status.readline())
        return texts[0], texts[1]


PROGRAM = """#!{python} -SE
import json, os, signal, sys, tempfile
with tempfile.TemporaryDirectory() as folder:
    os.mkfifo(status := os.path.join(folder, "status"))
    order = {{
        "status": status,
        "streams": [f"/proc/{{os.getpid()}}/fd/{{number}}" for number in (1, 2)],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "arguments": sys.argv[1:],
        "first": {first!r},
    }}
    with open("/proc/{here}/fd/{server}", "w") as server:
        print(json.dumps(order), file=server)
    with open(status) as lines:
        command = int(lines.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(command, number))
        code = int(lines.readline())
sys.exit(code if code >= 0 else 128 - code)
"""


class Commands(Forks):
    """A process that has imported the command and what most runs need, and forks for each call."""

    SERVER = COMMAND_SERVER

    def start(
        self,
        *arguments: str | Path,
        cwd: Path,
        first: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Command:
        """Begin `compress` in a folder, after some Python code."""
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(status := Path(folder, "status"))
            pipes = [os.pipe() for _ in range(2)]
            order = {
                "status": str(status),
                "streams": [f"/proc/{os.getpid()}/fd/{write}" for _, write in pipes],
                "environment": {**os.environ, **(environment or {})},
                "folder": str(cwd),
                "arguments": [*map(str, arguments)],
                "first": first,
            }
            self._send(order)
            command = Command(status.open(), *(os.fdopen(read) for read, _ in pipes))
            for _, write in pipes:
                os.close(write)
        return command

    def write_program(self, path: Path, first: str = "") -> None:
        """Write a program that a shell calls as `compress`, and that forks here."""
        assert self._server.stdin is not None
        server = self._server.stdin.fileno()
        python, here = sys.executable, os.getpid()
        path.write_text(PROGRAM.format(python=python, here=here, server=server, first=first))
        path.chmod(0o755)

    def call(self, *arguments: str | Path, **options) -> subprocess.CompletedProcess[str]:
        """Return how a command ended, and what it wrote."""
        command = self.start(*arguments, **options)
        output, errors = command.communicate(timeout=240)
        assert command.returncode is not None
        return subprocess.CompletedProcess(arguments, command.returncode, output, errors)
