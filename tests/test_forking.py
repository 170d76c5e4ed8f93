"""Processes that the tests fork are as new ones, but for torch."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cpu_time
from tests.forking import Commands


def test_nothing_of_ours_is_imported_and_nothing_stays(fresh_torch: Callable[[str], str]) -> None:
    code = """
import sys
from pathlib import Path
print(sorted({"compress", "export", "torchao", "onnx", "left"} & {*sys.modules}), Path.cwd().name)
sys.modules["left"] = sys
print("no answer", file=sys.stderr)
"""
    first = fresh_torch(code)
    assert first.startswith("[] ")
    assert fresh_torch(code) == first


def test_what_fails_is_told(fresh_torch: Callable[[str], str]) -> None:
    with pytest.raises(AssertionError, match="ValueError: broken"):
        fresh_torch("raise ValueError('broken')")
    assert fresh_torch("print(1)") == "1"


def test_a_shell_calls_the_command_by_a_program(commands: Commands, tmp_path: Path) -> None:
    commands.write_program(program := tmp_path / "compress")
    line = f"{program} check absent.yaml 2>&1 | cat; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    error, code = done.stdout.splitlines()
    assert error.startswith("error: absent.yaml: ") and code == "2"


def test_processor_time_of_other_processes_is_counted(commands: Commands, tmp_path: Path) -> None:
    computes = "sum(range(10_000_000))"
    before = cpu_time.seconds()
    subprocess.run([sys.executable, "-c", computes], check=True)
    child = cpu_time.seconds() - before
    assert child > 0.05
    commands.call("--version", cwd=tmp_path, first=computes)
    assert cpu_time.seconds() - before > child + 0.05
