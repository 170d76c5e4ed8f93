"""Text from files of others reaches no terminal as a command, and passes for no line of ours."""

import io
import json
import logging
import shutil
from pathlib import Path

import pytest
from rich.table import Table

from compress import cli
from compress.artifacts.eager_model import EagerModel
from compress.common.printable import CONTROL_CHARACTERS, escaped_json, printable
from compress.common.sealed_json import load_sealed
from compress.pipelines.reporting.terminal_table import print_table
from compress.pipelines.system.jsonl_log import LogFile
from compress.pipelines.system.rich_output import PlainConsole, PlainFormatter
from compress.pipelines.terminal.console import show_progress

HOSTILE = "x\x1b[2J\x1b[32m✓ proven\n✓ proven: it answers\r\x9b1mgone\u202eneverp"
FACTORY = f"""
from torch import nn

def mlp():
    raise ValueError({HOSTILE!r})
"""


def outputs(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.app([*arguments])
    said = capfd.readouterr()
    return int(end.value.code or 0), said.out, said.err


def forged(model: EagerModel, folder: Path) -> Path:
    """Return an artifact whose manifest holds hostile text wherever it holds text."""
    shutil.copytree(model.path, folder)
    content = load_sealed((folder / "manifest.json").read_bytes())
    content["lineage"] = [
        {"stage": HOSTILE, "settings": {HOSTILE: HOSTILE}, "inputs": {HOSTILE: HOSTILE}}
    ]
    content["signature"]["inputs"][0]["name"] = HOSTILE
    content["recipe"]["arguments"] = {HOSTILE: HOSTILE}
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_manifest_cannot_speak_for_the_tool(
    command: str, mlp: EagerModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = outputs(capfd, command, str(forged(mlp, tmp_path / "forged")))
    assert (code, err) == (0, "")
    assert not CONTROL_CHARACTERS.search(out)
    assert r"\x1b[2J" in out
    assert not [line for line in out.splitlines() if line.startswith(("✓", "proven: it answers"))]
    assert command == "verify" or not [x for x in out.splitlines() if x.startswith("  ✓")]


def test_a_manifest_of_a_hostile_kind_is_one_line(
    mlp: EagerModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = forged(mlp, tmp_path / "forged")
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, HOSTILE: 1}))
    code, out, err = outputs(capfd, "inspect", str(folder))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not CONTROL_CHARACTERS.search(err)


@pytest.mark.parametrize("how", [(), ("--debug",), ("--json",)])
def test_an_error_of_user_code_cannot_speak_for_the_tool(
    how: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hostile_nets.py").write_text(FACTORY)
    (tmp_path / "p.yaml").write_text(
        "version: 1\nmodel: {factory: 'hostile_nets:mlp', inputs: [{name: x, shape: [batch, 4]}]}\n"
        "stages: [{stage: export_onnx}]\n"
    )
    code, out, err = outputs(capfd, "check", str(tmp_path / "p.yaml"), *how)
    assert code == 2
    assert not CONTROL_CHARACTERS.search(out + err)
    assert not [line for line in err.splitlines() if line.startswith(("✓", "proven"))]


def test_tables_take_no_markup_and_no_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    def table(console: PlainConsole) -> Table:
        made = Table("name", title="[/red]")
        made.add_row("[bold]int8[/] :smile: \x1b[2J")
        return made

    print_table(table, ["a\x1b[2J [/red]\n✓ proven"])
    out = capfd.readouterr().out
    assert r"[bold]int8[/] :smile: \x1b[2J" in out
    assert "[/red]" in out.splitlines()[0]
    assert out.splitlines()[-2:] == [r"a\x1b[2J [/red]", "  ✓ proven"]
    assert "\x1b" not in out


def test_colours_of_ours_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    console = PlainConsole(file=stream, force_terminal=True, width=80, color_system="standard")
    console.print("\x1b[31mtheirs", style="green")
    assert stream.getvalue() == "\x1b[32m\\x1b[31mtheirs\x1b[0m\n"


def test_progress_lines_take_no_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    with show_progress() as (progress, announce):
        progress(HOSTILE, 1, 2, HOSTILE)
        announce(HOSTILE)
    err = capfd.readouterr().err
    assert err.count(r"\x1b[2J") == 3
    assert not CONTROL_CHARACTERS.search(err)


def test_log_lines_take_no_escapes(tmp_path: Path) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a", logging.ERROR, "b", 1, "%s", (HOSTILE,), exc_info)
    assert not CONTROL_CHARACTERS.search(PlainFormatter().format(record))
    log = LogFile(tmp_path / "log.jsonl", "run", lambda: HOSTILE)
    log.emit(record)
    log.close()
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert not CONTROL_CHARACTERS.search(line)
    assert json.loads(line)["message"] == HOSTILE


def test_what_people_write_is_left_as_it_is() -> None:
    for text in ("naïve café → 数据 🙂 👩‍💻", "a\tb", "שלום", "✓ 100 %"):
        assert printable(text) == text
    assert json.loads(escaped_json(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE
