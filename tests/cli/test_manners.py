"""What every command owes to scripts and shells: JSON, quiet, one-line errors, completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from compress import cli

COMMANDS = typer.main.get_command(cli.app).commands
TAKES_NOTHING = {"devices", "doctor", "schema"}
FILE = """\
version: 1
model: {factory: "nets:mlp"}
stages:
  - {stage: train, epochs: 2}
  - {name: int8, stage: quantize_dynamic}
  - {stage: export_onnx}
"""


def options(name: str) -> set[str]:
    return {flag for parameter in COMMANDS[name].params for flag in parameter.opts}


def called(name: str, *more: str) -> SystemExit:
    """Call a command with paths at which nothing is, and return how it ended."""
    positional = [p for p in COMMANDS[name].params if p.param_type_name == "argument"]
    arguments = ["absent" for _ in positional]
    for needed in (p for p in COMMANDS[name].params if p.required and p not in positional):
        arguments += [needed.opts[0], "absent-too"]
    with pytest.raises(SystemExit) as end:
        cli.app([name, *arguments, *more])
    return end.value


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_the_same_three(name: str) -> None:
    assert {"--json", "--quiet", "-q", "--debug"} <= options(name)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - TAKES_NOTHING))
def test_a_bad_path_is_one_line_and_one_json_answer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = called(name, "--json")
    said = capfd.readouterr()
    error = json.loads(said.out)["error"]
    assert set(error) == {"kind", "exit_code", "lines"}
    assert error["exit_code"] == ended.code != 0
    assert said.err.splitlines() == [f"error: {line}" for line in error["lines"]]
    assert len(error["lines"]) == 1
    assert list(tmp_path.iterdir()) == []

    called(name, "--quiet")
    said = capfd.readouterr()
    assert said.out == ""
    assert [line[:7] for line in said.err.splitlines()] == ["error: "]

    called(name, "--debug")
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("name", sorted(TAKES_NOTHING))
def test_what_takes_no_path_answers_in_json_or_not_at_all(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert called(name, "--json").code == 0
    assert json.loads(capfd.readouterr().out)
    assert called(name, "--quiet").code == 0
    assert capfd.readouterr().out == ""


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """Return the command as pip installs it, in a folder with a pipeline and a run."""
    script = tmp_path / "compress"
    lines = (
        f"#!{sys.executable}",
        "import sys",
        f"sys.path.insert(0, {str(Path(cli.__file__).parent)!r})",
    )
    script.write_text("\n".join((*lines, "from compress.cli import main", "main()\n")))
    script.chmod(0o755)
    (tmp_path / "small.yaml").write_text(FILE)
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "report.json").write_text('{"status": "passed"}')
    return script


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run --json", "Missing argument 'PIPELINE.YAML'."),
        ("run small.yaml --jobs 0 --json", "Invalid value for '--jobs': "),
        ("absent --json", "No such command 'absent'."),
    ],
)
def test_a_wrong_command_line_is_one_json_answer_too(command: Path, line: str, said: str) -> None:
    done = subprocess.run([command, *line.split()], capture_output=True, text=True, timeout=60)
    error = json.loads(done.stdout)["error"]
    assert done.returncode == error["exit_code"] == 2
    assert len(error["lines"]) == 1 and error["lines"][0].startswith(said)
    assert said in done.stderr


def completed(command: Path, line: str) -> list[str]:
    """Return what bash is given at the end of a line; `_` stands for a word not yet begun."""
    words = line.removesuffix("_")
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(line.split()) - 1)}
    environment = {**os.environ, **asked, "_COMPRESS_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [command], cwd=command.parent, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_stages_and_runs(command: Path) -> None:
    assert sorted(completed(command, "compress re")) == ["repair", "report"]
    assert completed(command, "compress why small.yaml i") == ["int8"]
    stages = ["train", "int8", "export_onnx"]
    assert completed(command, "compress run small.yaml --from _") == stages
    assert completed(command, "compress diff run") == ["runs/small"]
    (command.parent / "small.yaml").write_text("stages: 3")
    assert completed(command, "compress why small.yaml i") == []


def test_completion_is_shown(command: Path) -> None:
    # Or it would look for the shell that this was started from, and there may be none.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [command, "--show-completion", "bash"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "_COMPRESS_COMPLETE=complete_bash" in done.stdout, done.stderr
