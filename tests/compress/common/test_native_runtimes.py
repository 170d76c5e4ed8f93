"""Native runtimes raise what is wrong and print nothing, send nothing, take no file's options."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attack import cases_folders
from compress import cli
from compress.common.errors import ArtifactInvalid
from compress.export.imported.exported_files import import_file, signature_of

SESSION = """
import sys
import numpy as np
from compress.common.foreign.native_runtimes import onnx_runtime

session = onnx_runtime().InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
session.run(None, {"x": np.ones((1, 4), np.float32)})
"""


def test_a_name_of_an_operator_reaches_the_terminal_in_the_message_alone(tmp_path, capfd) -> None:
    file = cases_folders.onnx_that_writes_to_the_terminal(tmp_path)
    with pytest.raises(ArtifactInvalid, match="Non-zero status code"):
        import_file("onnx", file, signature_of("onnx", file), tmp_path / "sealed")
    assert capfd.readouterr().err == ""


CALLS_IT = f"""{SESSION.partition("session.run")[0]}
try:
    session.run(None, {{"x": np.ones((1, 4), np.float32)}})
except Exception as error:
    assert "Name:'" in str(error)
"""


def test_onnx_runtime_writes_no_log_of_its_own_to_the_terminal(tmp_path) -> None:
    file = cases_folders.onnx_that_writes_to_the_terminal(tmp_path)
    command = [sys.executable, "-c", CALLS_IT, str(file)]
    ended = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert ended.stderr == ended.stdout == b""


def test_a_name_of_an_operator_is_shown_without_its_escape_sequences(tmp_path, capfd) -> None:
    cases_folders.onnx_that_writes_to_the_terminal(tmp_path)
    text = "version: 1\nname: p\nmodel: {file: model.onnx}\nstages: [{stage: package_triton}]\n"
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(SystemExit):
        cli.app(["check", str(tmp_path / "p.yaml")])
    said = capfd.readouterr()
    assert r"Name:'\x1b[2J" in said.err
    assert "\x1b" not in said.err + said.out


def test_control_characters_in_warnings_of_libraries_are_shown(tmp_path, commands) -> None:
    (tmp_path / "data.py").write_text(
        "import warnings\ndef make():\n    warnings.warn('name ' + chr(27) + '[2J')\n"
    )
    model = 'model: {factory: "data:make", inputs: [{name: x, shape: [1, 4]}]}'
    text = f"version: 1\nname: p\n{model}\nstages: [{{stage: export_onnx}}]\n"
    (tmp_path / "pipeline.yaml").write_text(text)
    ended = commands.call("check", "pipeline.yaml", cwd=tmp_path)
    assert "name \\x1b[2J" in ended.stderr
    assert "\x1b" not in ended.stderr


def _run(file: Path, folder: Path) -> None:
    environment = os.environ | {"HOME": str(folder / "home"), "ORT_LOAD_CONFIG_FROM_MODEL": "1"}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    command = [sys.executable, "-c", SESSION, str(file)]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=60)


def test_options_in_a_files_metadata_are_not_taken_and_nothing_is_kept_to_be_sent(tmp_path) -> None:
    file = cases_folders.onnx_with_options_of_its_session(tmp_path)
    (tmp_path / "home").mkdir()
    _run(file, tmp_path)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["home", "model.onnx"]


LOOKS_UP = """
import sys, time
from compress.common.foreign.native_runtimes import openvino_core

asked = []
sys.addaudithook(lambda event, found: event == "socket.getaddrinfo" and asked.append(found[0]))
openvino_core()
time.sleep(0.5)  # it would ask in a thread
print(asked)
"""


def test_openvino_sends_nothing_when_it_is_imported(tmp_path) -> None:
    pytest.importorskip("openvino")
    environment = os.environ | {"HOME": str(tmp_path)}
    command = [sys.executable, "-c", LOOKS_UP]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[]\n", ended.stderr
    assert not [*tmp_path.iterdir()]
