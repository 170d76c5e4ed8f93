"""The tutorial: its files are written, its commands run, and it prints what the page shows."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.forking import Commands
from tests.pipelines.conftest import BRIEFLY

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
PORT = "8080"
MARK = "--- end of block ---"


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


BLOCKS = [Block(*found) for found in BLOCK.findall(PAGE)]


def _in_order(shown: str, printed: str) -> None:
    """Find every line that is shown among those printed, in order; `…` is any text."""
    rest = printed.splitlines()
    for line in shown.splitlines():
        pattern = ".*".join(map(re.escape, line.split("…")))
        while rest and not re.fullmatch(pattern, rest[0].rstrip()):
            rest.pop(0)
        assert rest, f"not printed, or not in this order: {line}\n{printed}"
        rest.pop(0)


def test_lines_are_found_in_order_only() -> None:
    _in_order("a … c\nd", "x\na b c\ny\nd\n")
    for shown in ("d\na … c", "a b", "e"):
        with pytest.raises(AssertionError, match="not printed"):
            _in_order(shown, "x\na b c\ny\nd\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.torchserve
@pytest.mark.skipif(
    not (shutil.which("java") and shutil.which("curl")), reason="needs java and curl"
)
def test_the_tutorial_does_what_it_says(tmp_path: Path, commands: Commands) -> None:
    shown = [
        (before.text, block.text) for before, block in pairwise(BLOCKS) if block.title == "prints"
    ]
    assert len(shown) >= 8
    script = tmp_path / "script.sh"
    script.write_text("set -eu\n" + "".join(_step(tmp_path, i, b) for i, b in enumerate(BLOCKS)))
    port = _free_port()
    script.write_text(script.read_text().replace(PORT, port))
    (programs := tmp_path / "programs").mkdir()
    commands.write_program(programs / "compress", first=BRIEFLY)
    (programs / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (programs / "python").chmod(0o755)
    printed = _run(script, tmp_path, programs).replace(port, PORT).split(MARK + "\n")
    commands = [block.text for block in BLOCKS if block.language == "bash"]
    assert len(printed) == len(commands) + 1, printed[-1]
    for command, lines in shown:
        assert command in commands
        _in_order(lines, printed[commands.index(command)])


def _step(folder: Path, index: int, block: Block) -> str:
    """Return the shell's lines for one block: a file to be written, or commands."""
    if block.language == "bash":
        return f"{block.text}\necho; echo {shlex.quote(MARK)}\n"
    if block.title in ("", "prints"):
        return ""
    kept = folder / f"block-{index}"
    kept.write_text(block.text)
    return f"cp {shlex.quote(str(kept))} {block.title}\n"


def _run(script: Path, folder: Path, programs: Path) -> str:
    """Return all that the script prints."""
    (work := folder / "work").mkdir()
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        ["bash", script],
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=540)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return printed


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
