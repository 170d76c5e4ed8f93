"""A sample of what `make attack` tries, the same each time; and what an attack does is seen."""

from pathlib import Path

import pytest

from benchmarks.attack import trials
from benchmarks.attack.files import attack_files, cases
from benchmarks.attack.trials import CommandTrials, case_folder
from tests.forking import Commands

FEW = 3
HARMLESS = "import torch\n\ndef net():\n    return torch.nn.Linear(4, 2)\n"
ATTACKER = """
import socket

open("ran", "w")
open("outside/secret.txt").read()
try:
    socket.getaddrinfo("example.invalid", 80)
except OSError:
    pass
"""
PIPELINE = """\
version: 1
model: {factory: "own:net", inputs: [{name: x, shape: [batch, 4]}]}
stages: [{stage: export_onnx}]
"""


def test_names_of_attacks_differ() -> None:
    names = [name for name, _ in cases()]
    assert len(names) > 400 and len({*names}) == len(names)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_files_are_refused_or_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "MOST_SECONDS", 120.0)  # other tests take the processors
    section = attack_files("", FEW)
    assert section.tried == FEW and not section.failures, section.details


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_an_attack_does_is_seen(tmp_path: Path, commands: Commands) -> None:
    found = {}
    for name, more in {"harmless": "", "hostile": ATTACKER}.items():
        with case_folder(tmp_path, name) as folder:
            (folder / "own.py").write_text(HARMLESS + more)
            (folder / "p.yaml").write_text(PIPELINE)
            found[name] = (
                CommandTrials(commands).try_command(name, folder, ["check", "p.yaml"]).failure()
            )
    assert not found["harmless"]
    for words in ("planted code ran", "a file outside was opened", "asked the network"):
        assert words in found["hostile"]
