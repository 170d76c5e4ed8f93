"""Runs while the clock of the machine jumps: backwards, forwards, and at every look at it."""

import tempfile
from pathlib import Path

from benchmarks.attack.report import Section
from benchmarks.attack.trials import AttackedCommands, CommandTrials, case_folder

YEAR = 365 * 86_400
JUMPS = {
    "a year back": f"_now() - {YEAR}",
    "a year ahead": f"_now() + {YEAR}",
    "before 1970": "-1.0",
    "back by an hour at every look": "_now() - 3600 * next(_looks)",
    "to and fro": f"_now() + {YEAR} * (-1) ** next(_looks)",
}
CODE = """
import itertools, time
_now, _looks = time.time, itertools.count()
time.time = lambda: {jump}
time.time_ns = lambda: int(time.time() * 1e9)
"""
COMMANDS = (
    ("run", "small.yaml", "--quiet"),
    ("run", "small.yaml", "--quiet"),
    ("report", "runs/small"),
    ("verify", "runs/small/artifacts/export_onnx"),
    ("gc", "runs/small", "--older-than", "12h"),
    ("run", "small.yaml", "--quiet"),
)


def attack_clock(only: str, most: int | None) -> Section:
    """Run a pipeline twice, read its report, verify, clean up and run again under each clock."""
    from tests.pipelines.conftest import BRIEFLY, FILE, NETS

    section = Section("jumps of the clock")
    with tempfile.TemporaryDirectory() as root, AttackedCommands("") as commands:
        tester = CommandTrials(commands)
        for name, jump in [(n, j) for n, j in JUMPS.items() if only in n][:most]:
            with case_folder(Path(root), name) as folder:
                (folder / "nets.py").write_text(NETS)
                (folder / "small.yaml").write_text(FILE)
                before, made = BRIEFLY + CODE.format(jump=jump), set()
                for command in COMMANDS:
                    trial = tester.try_command(name, folder, command, before)
                    section.note("seconds", trial.seconds)
                    failure = trial.failure() or (trial.errors[:300] if trial.code else "")
                    manifest = folder / "runs/small/artifacts/export_onnx/manifest.json"
                    made |= {manifest.read_bytes()} if manifest.exists() else set()
                    section.add(f"{name}: {command[0]}", failure)
                section.add(
                    f"{name}: one artifact", "" if len(made) == 1 else f"{len(made)} of them"
                )
    return section
