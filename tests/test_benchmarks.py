"""What runs the benchmarks leaves no process behind, and drops no table that it did not make."""

import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PAGE = """# Beside the peers

## Serving

one

# ONNX files that others trained

head

## Read and written, without compression

old table

## File types (magika 1.0)

old types
"""


def run_in_benchmarks(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = ['.']\n{code}"]
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_command_over_its_time_is_ended_with_what_it_started(tmp_path: Path) -> None:
    file = tmp_path / "seconds"
    code = f"""
import os
from pathlib import Path
from peer_tools import environments
environments.LONGEST_SECONDS = 1
command = "while true; do date +%s.%N > {file}; sleep 0.05; done"
print(environments.cost_of(["sh", "-c", command], Path({str(tmp_path)!r})))
"""
    assert run_in_benchmarks(code) == "took longer than 1 s"
    last = file.read_text()
    time.sleep(0.3)
    assert file.read_text() == last, "it still runs"


def test_tables_of_files_that_were_not_measured_stay_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "magika.md").write_text("## File types (magika 1.0)\n\nnew types")
    code = """
import onnx_in
from pathlib import Path
folder = Path(sys.argv[1])
print(*onnx_in.tables(folder, folder / "page.md"), sep="\\n--\\n")
"""
    assert run_in_benchmarks(code, tmp_path).split("\n--\n") == [
        "## Read and written, without compression\n\nold table",
        "## File types (magika 1.0)\n\nnew types",
    ]
