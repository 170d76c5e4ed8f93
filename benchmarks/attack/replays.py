"""`compress verify --replay` of a run in which somebody changed something, or planted code."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.attack import forgeries
from benchmarks.attack.report import Section
from benchmarks.attack.trials import AttackedCommands, CommandTrials, case_folder

ROOT = Path(__file__).parents[2]
ARCHIVE = Path("artifacts/package_torchserve")
PIPELINE = """\
version: 1
seed: 1
model:
  factory: models:ResNet
  arguments: {blocks: 1, width: 4, classes: 10}
  inputs: [{name: image, shape: [batch, 1, 8, 8]}]
data: {factory: "data:digits", batch_size: 120}
metric: accuracy
stages:
  - {name: onnx, stage: export_onnx, gates: []}
  - {stage: package_torchserve, gates: []}
"""
NO_JAVA = "import os\nos.environ['PATH'] = ''\n"
"""The archive's handler is asked without TorchServe, which takes seconds to start."""


def _name_planted_code(run: Path, *, seal: bool) -> None:
    """Let `lock.json` name a pipeline file whose code writes a file, with a digest made anew."""
    from compress.common.sealed_json import write_sealed

    folder = run / "planted"
    shutil.copytree(ROOT / "examples" / "digits", folder)
    (folder / "models.py").write_text(f"open({str(run.parent / 'ran')!r}, 'w')\n")
    (folder / "small.yaml").write_text(PIPELINE)
    lock = json.loads((run / "lock.json").read_bytes()) | {"file": str(folder / "small.yaml")}
    (run / "lock.json").unlink()
    if seal:
        write_sealed(run / "lock.json", lock)
    else:
        (run / "lock.json").write_text(json.dumps(lock))


def forged_runs(run: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield the name of each forgery, and a function of a run's folder."""
    yield "planted code", partial(_name_planted_code, seal=False)
    yield "planted code, with a digest", partial(_name_planted_code, seal=True)
    yield "lock of another artifact", forgeries.lock_of_another_artifact
    yield "class names exchanged", forgeries.class_names_exchanged
    made = sorted(each for each in run.glob("artifacts/*/*") if each.is_file())
    read = [run / "lock.json", run / "report.json", *made]
    for number, file in enumerate(read):
        name = file.relative_to(run)

        def flip(forged: Path, name: Path = name, number: int = number) -> None:
            forgeries.flip_a_byte(forged / name, number)

        yield f"a byte of {name}", flip


def attack_replays(only: str, most: int | None) -> Section:
    """Verify each forged run, with `--replay`, in a process of its own."""
    section = Section("replays of forged runs")
    with tempfile.TemporaryDirectory() as root, AttackedCommands("") as commands:
        tester, made = CommandTrials(commands), _made_run(Path(root))
        whole = [("an untouched run", lambda _: None), *forged_runs(made)]
        for name, forge in [each for each in whole if only in each[0]][:most]:
            with case_folder(Path(root), name) as folder:
                shutil.copytree(made, folder / "run", copy_function=shutil.copyfile)
                forge(folder / "run")
                command = ("verify", folder / "run" / ARCHIVE, "--replay")
                trial = tester.try_command(name, folder, command, NO_JAVA)
                section.note("seconds", trial.seconds)
                expected = 0 if name == "an untouched run" else 2
                wrong = f"exit code {trial.code}" if trial.code != expected else ""
                section.add(name, trial.failure() or wrong)
                if trial.failure() or wrong:
                    section.details[name] = trial.errors[:600]
    return section


def _made_run(root: Path) -> Path:
    """Make the run that is forged: a network for digits, packed for TorchServe."""
    from compress.pipelines import Pipeline
    from tests.pipelines.conftest import measured_briefly

    shutil.copytree(ROOT / "examples" / "digits", root / "digits")
    (root / "digits" / "small.yaml").write_text(PIPELINE)
    with measured_briefly():
        Pipeline.from_yaml(root / "digits" / "small.yaml").run(root / "made")
    return root / "made"
