"""New processes that have torch and nothing of ours: forked where torch was imported, once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

SERVER = """
import gc, json, os, runpy, sys, traceback
gc.disable()
import torch, torch._dynamo
import torch.export.pt2_archive._package

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
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """A process that has imported torch, and forks for each script."""

    def __init__(self) -> None:
        # What is imported is found as from anywhere else, not because of where the tests began.
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
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
        asked = json.dumps([str(script), str(folder), *map(str, streams)])
        assert self._server.stdin is not None
        print(asked, file=self._server.stdin, flush=True)
        output, errors = streams
        assert self._answer() == "0", errors.read_text()
        return output.read_text().strip()

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()
