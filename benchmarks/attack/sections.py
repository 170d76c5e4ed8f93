"""The sections of `make attack`, in the order in which they are tried."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.attack.clock import attack_clock
from benchmarks.attack.files import attack_files
from benchmarks.attack.notebook import attack_notebook
from benchmarks.attack.replays import attack_replays
from benchmarks.attack.report import Section
from benchmarks.attack.requests import ANY
from benchmarks.attack.store import attack_store
from benchmarks.attack.torchserve import attack_torchserve

ROOT = Path(__file__).parents[2]
KILLS, SEED = 20, 8
FORGED = re.compile(r"^\.*forged (.*): (\w+)$", re.MULTILINE)
COUNTED = re.compile(r"tried (\d+), survived (\d+)")


def attack_servers(only: str, most: int | None) -> Section:
    """Send hostile requests to servers of tensors, texts and a decoder."""
    section = Section("requests")
    script = Path(__file__).with_name("request_attacks.py")
    if not script.exists():
        section.skipped = "no requests here"
        return section
    # All kinds at a time: half of the time goes by until a server gives slow clients up.
    servers = [
        subprocess.Popen(
            [sys.executable, str(script), "--only", only, "--kind", kind],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in ANY
    ]
    for kind, server in zip(ANY, servers, strict=True):
        lines = server.communicate()[0].splitlines()
        tried = [
            line for line in lines if line[:2] in ("! ", "  ") and line[2:].startswith(f"{kind} ")
        ]
        counted = COUNTED.search("\n".join(lines))
        if not counted or int(counted[1]) != len(tried):
            section.add(kind, f"ended with {server.returncode}: {lines[-1:]}")
        for line in tried[:most]:
            section.add(line[2:60].strip(), line[60:].strip() if line[0] == "!" else "")
    return section


def attack_runs(only: str, most: int | None) -> Section:
    """Kill a run at random moments, each time resumed; compare what it made in the end."""
    from tests.pipelines.conftest import NETS
    from tests.pipelines.test_killed import FILE

    section, times = Section("kills of a run"), min(KILLS, most or KILLS)
    if only and only not in section.name:
        return section
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "nets.py").write_text(NETS.replace(', "test": slice(180, 240)', ""))
        Path(folder, "small.yaml").write_text(FILE)
        script = ROOT / "tests" / "pipelines" / "killing.py"
        done = subprocess.run(
            [sys.executable, str(script), folder, str(SEED), str(times)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    lines = done.stdout.splitlines()
    killed = json.loads(lines[-1])["at"] if done.returncode == 0 else [done.stderr[-500:]]
    for number, place in enumerate(killed):
        section.add(f"{number}: {place[:80]}", place if done.returncode else "")
    return section


def attack_records(only: str, most: int | None) -> Section:
    """Change a byte, or a figure, in every file of a run, and have it read and run again."""
    section = Section("forgeries")
    if only and only not in section.name:
        return section
    file = ROOT / "tests" / "pipelines" / "test_forged_files.py"
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "slow and not soak", str(file)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for number, (name, result) in enumerate(FORGED.findall(done.stdout)[:most]):
        section.add(f"{number}: {name}", result if result != "noticed" else "")
    if done.returncode:
        section.add("pytest", f"ended with {done.returncode}")
    return section


SECTIONS: dict[str, Callable[[str, int | None], Section]] = {
    "files": attack_files,
    "requests": attack_servers,
    "forgeries": attack_records,
    "kills": attack_runs,
    "store": attack_store,
    "clock": attack_clock,
    "notebook": attack_notebook,
    "replays": attack_replays,
    "torchserve": attack_torchserve,
}
"""Name → function of words that names must hold, and of how many to try at most."""
