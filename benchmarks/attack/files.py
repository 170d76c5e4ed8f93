"""Tries hostile files and folders with the commands that a user would give them to."""

import importlib
import inspect
import pkgutil
import queue
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import benchmarks.attack
from benchmarks.attack.report import Section
from benchmarks.attack.trials import AttackedCommands, CommandTrials, Trial, case_folder

Case = Callable[[Path], Path]
AT_ONCE = 2
SEED = 0


def cases() -> Iterator[tuple[str, Case]]:
    """Return all cases: those of `CASES`, and each function of a folder, in modules `cases_*`."""
    for found in pkgutil.iter_modules(benchmarks.attack.__path__):
        if not found.name.startswith("cases_"):
            continue
        module = importlib.import_module(f"benchmarks.attack.{found.name}")
        yield from getattr(module, "CASES", {}).items()
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__ and not name.startswith("_")
            if is_own and [*inspect.signature(function).parameters] == ["folder"]:
                yield name.replace("_", " "), function


def commands_for(given: Path, folder: Path) -> list[list[str | Path]]:
    """Return the commands that a user would give a file or folder to."""
    if given.suffix in (".yaml", ".yml"):
        return [["check", given]]
    if given.suffix == ".mar":
        return [["verify", given]]
    if (given / "oci-layout").exists() or (given / "index.json").exists():
        return [["package", layered(folder), "--image", folder / "image", "--base", given]]
    if (given / "manifest.json").is_symlink() or (given / "manifest.json").exists():
        bench = ["bench", given, "--seconds", "0.01", "--batch", "1"]
        return [["inspect", given], ["verify", given], bench]
    return [["check", pipeline_for(given, folder)]]


def layered(folder: Path) -> Path:
    """Seal the model that is packaged on a base image."""
    from benchmarks.attack.cases_texts import sound_artifact

    return sound_artifact(folder / "packaged")


def pipeline_for(given: Path, folder: Path) -> Path:
    """Write a pipeline file that reads a checkpoint, a model's file or a Hugging Face folder."""
    inputs, stage = "[{name: x, shape: [batch, 4]}]", "export_onnx"
    name = given.relative_to(folder) if given.is_relative_to(folder) else given
    if (given / "config.json").exists() or (given / "config.json").is_symlink():
        inputs = "[{name: input_ids, shape: [batch, 8], dtype: int64}]"
        source = f"huggingface: {name}"
    elif given.suffix in (".onnx", ".pt2", ".ts"):
        source = f"file: {name}"
        stage = {".onnx": "export_openvino", ".ts": "package_torchserve"}.get(given.suffix, stage)
    else:
        arguments = "{in_features: 4, out_features: 2}"
        source = f"factory: torch.nn:Linear\n  arguments: {arguments}\n  checkpoint: {name}"
    file = folder / "pipeline.yaml"
    file.write_text(
        f"version: 1\nmodel:\n  {source}\n  inputs: {inputs}\nstages: [{{stage: {stage}}}]\n"
    )
    return file


def attack_files(only: str, most: int | None) -> Section:
    """Try all cases, or so many of them that are chosen at random, always the same."""
    chosen = [case for case in cases() if only in case[0]]
    if most is not None:
        chosen = random.Random(SEED).sample(chosen, min(most, len(chosen)))
    section, waiting = Section("files"), queue.SimpleQueue[tuple[str, Case]]()
    for case in chosen:
        waiting.put(case)
    with (
        tempfile.TemporaryDirectory() as root,
        AttackedCommands("") as commands,
    ):
        tester, writing = CommandTrials(commands), threading.Lock()

        def work() -> None:
            while True:
                try:
                    name, make = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    trials = try_case(tester, Path(root), name, make, writing)
                except Exception as error:  # noqa: BLE001 - the next cases are tried all the same
                    section.add(name, f"could not be tried: {type(error).__name__}: {error}")
                    continue
                found = [f"{t.command}: {failure}" for t in trials if (failure := t.failure())]
                section.add(name, "; ".join(found))
                for trial in trials:
                    section.note("seconds", trial.seconds)
                    section.note("GiB", trial.gib)
                    if trial.failure():
                        section.details[name] = trial.errors[:600]

        threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return section


def try_case(
    tester: CommandTrials, root: Path, name: str, make: Case, writing: threading.Lock
) -> list[Trial]:
    """Write a case's file and try each command on it."""
    with case_folder(root, name) as folder:
        with writing:  # torch's and transformers' writers share state
            given = make(folder)
        return [
            tester.try_command(name, folder, command) for command in commands_for(given, folder)
        ]
