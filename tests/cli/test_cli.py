"""The command as a user runs it: exit codes, one-line errors, JSON, interruption."""

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compress import cli
from tests.forking import Commands
from tests.pipelines.conftest import BRIEFLY, measured_briefly

Done = subprocess.CompletedProcess[str]

ROOT = Path(__file__).parents[2]
COMPRESS = [sys.executable, "-m", "compress.cli"]

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def mlp():
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))

def data():
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return {"train": TensorDataset(x[:180], y[:180]), "val": TensorDataset(x[180:], y[180:])}
"""

# An epoch takes half a second or more while a file lies there, and as good as nothing later.
SLOW_NETS = f"""
import os, time
{NETS}
class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.003 if os.path.exists("slow") else 0)
        return super().__getitem__(index)

quick = data

def data():
    return {{name: Slow(*part.tensors) for name, part in quick().items()}}
"""

FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data"}
stages:
  - {stage: train, epochs: 2}
  - {stage: export_onnx, gates: [{gate: parity, atol: 1e-4}]}
"""


def compress(*arguments: str | Path, cwd: Path, **environment: str) -> Done:
    """Run a command as a shell does."""
    return subprocess.run(
        [*COMPRESS, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable:
    """Return what runs a command in this process, where torch has been imported."""

    def call(*arguments: str | Path, cwd: Path) -> Done:
        monkeypatch.chdir(cwd)
        with measured_briefly(), pytest.raises(SystemExit) as end:
            cli.app([*map(str, arguments)])
        said = capfd.readouterr()
        return Done(arguments, end.value.code, said.out, said.err)

    return call


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path) -> Path:
    (folder / "nets.py").write_text(NETS)
    (folder / "small.yaml").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, commands: Commands) -> tuple[Path, Done]:
    """Return a folder in which the pipeline was run once, and what that said."""
    user = written(tmp_path_factory.mktemp("finished_run"))
    return user, commands.call("run", "small.yaml", cwd=user, first=BRIEFLY)


@pytest.fixture
def ran(finished_run: tuple[Path, Done], tmp_path: Path) -> Path:
    """Return a copy of the folder in which the pipeline was run, store included."""
    return shutil.copytree(finished_run[0], tmp_path / "user")


def test_help_of_every_command_imports_neither_torch_nor_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom compress import cli\n"
        "for name in ('', *(c.callback.__name__ for c in cli.app.registered_commands)):\n"
        "    sys.argv = ['compress', *name.split(), '--help']\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as stop:\n        assert not stop.code, name\n"
        "slow = {'torch', 'numpy', 'pydantic', 'rich', 'yaml', 'jinja2', 'onnx'}\n"
        "assert not slow & {*sys.modules}, slow & {*sys.modules}\n"
    )
    helps = _python(code, cwd=tmp_path).stdout
    assert helps.count("Examples:") >= len(cli.app.registered_commands), "join has none"
    listed = re.findall(r"^  (\w+)  ", helps.partition("Commands:")[2], re.M)
    assert listed[0] == "init"
    assert "compress 0." in compress("--version", cwd=tmp_path).stdout


def _python(code: str, cwd: Path) -> Done:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("command", ["check", "run"])
def test_refusing_a_bad_file_imports_no_tensors(user: Path, command: str) -> None:
    (user / "small.yaml").write_text(FILE.replace("epochs", "epoch"))
    code = (
        "import sys\nfrom compress import cli\n"
        f"sys.argv = ['compress', {command!r}, 'small.yaml']\n"
        "try:\n    cli.main()\n"
        "except SystemExit as stop:\n    assert stop.code == 2\n"
        "assert not {'torch', 'numpy'} & {*sys.modules}\n"
    )
    done = _python(code, cwd=user)
    assert "small.yaml:7" in done.stderr
    assert "did you mean 'epochs'" in done.stderr


def test_checking_a_valid_file_quickly_imports_no_torch(user: Path) -> None:
    (user / "nets.py").unlink()  # nor what the file names
    code = (
        "import sys\nfrom compress import cli\n"
        "sys.argv = ['compress', 'check', '--quick', '--json', 'small.yaml']\n"
        "try:\n    cli.main()\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = _python(code, cwd=user)
    assert json.loads(done.stdout)["signature"] is None


def test_run_check_inspect_and_json(
    finished_run: tuple[Path, Done], called: Callable, commands: Commands
) -> None:
    user, done = finished_run
    assert done.returncode == 0, done.stderr
    assert "train: running (not run before)" in done.stderr
    assert "val accuracy" in done.stderr
    assert "export_onnx" in done.stdout

    again = commands.call("run", "small.yaml", "--json", cwd=user, first=BRIEFLY)
    report = json.loads(again.stdout)
    assert again.stderr == ""
    assert [s["cached"] for s in report["stages"]] == [True, True]

    dry = called("run", "small.yaml", "--dry-run", "--force", cwd=user)
    assert dry.stdout.splitlines()[0].startswith("source: runs")

    artifact = user / "runs/small/artifacts/export_onnx"
    assert "input x float32 ['batch', 4]" in called("inspect", artifact, cwd=user).stdout
    inspected = json.loads(called("inspect", artifact, "--json", cwd=user).stdout)
    assert inspected["kind"] == "onnx"
    verified = called("verify", artifact, cwd=user)
    assert verified.returncode == 0, verified.stderr
    assert "proven: " in verified.stdout

    checked = called("check", "small.yaml", cwd=user)
    assert "valid (train → export_onnx)" in checked.stdout


def test_the_docs_list_the_keys_of_the_json(
    finished_run: tuple[Path, Done],
    tmp_path: Path,
    called: Callable,
) -> None:
    run, artifact = "runs/small", "runs/small/artifacts/export_onnx"
    model = ["--model", "nets:mlp", "--data", "nets:data"]
    commands = {
        "run": ["small.yaml"],
        "report": [run],
        "check": ["small.yaml"],
        "init": [str(tmp_path / "new.yaml"), *model],
        "inspect": [artifact],
        "verify": [artifact],
        "why": ["small.yaml", "train"],
        "diff": [run, run],
        "gc": [run, "--dry-run"],
        "doctor": [],
    }
    page = (ROOT / "docs" / "cli.md").read_text()
    for name, arguments in commands.items():
        (row,) = re.findall(rf"^\| (?:`\w+`, )*`{name}`.*? \| (.*) \|", page, re.MULTILINE)[:1]
        done = called(name, *arguments, "--json", cwd=finished_run[0])
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        documented = set(re.findall("`([a-z_]+)`", row.partition(";")[0])) - {"null"}
        assert len(documented) >= 3
        assert documented <= found.keys(), name
        if name == "run":
            assert documented == found.keys()


def test_a_tampered_artifact_is_refused(ran: Path, called: Callable) -> None:
    model = ran / "runs/small/artifacts/export_onnx/model.onnx"
    model.chmod(0o644)
    model.write_bytes(model.read_bytes() + b"x")
    done = called("verify", model.parent, cwd=ran)
    assert done.returncode == 2
    assert "model.onnx is not the file that was sealed" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "code", "message"),
    [
        ("train", "trian", 2, "did you mean 'train'"),
        ("nets:mlp", "nets:mpl", 2, "has no callable 'mpl'"),
        ("nets:mlp", "absent:mlp", 2, "No module named 'absent'"),
        ("[batch, 4]", "[batch, 5]", 2, "does not take x [2, 5]"),
        ("nets:data", "nets:mlp", 2, "expected {"),
        ("small", "small", 2, "No such file"),
        ("version: 1", "version: 1\ndevice: cuda:9", 4, "CUDA devices"),
    ],
)
def test_each_refusal_is_one_line_with_its_exit_code(
    user: Path, called: Callable, old: str, new: str, code: int, message: str
) -> None:
    name = "absent.yaml" if old == new else "small.yaml"
    (user / "small.yaml").write_text(FILE.replace(old, new, 1))
    done = called("run", name, cwd=user)
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(user: Path, called: Callable) -> None:
    (user / "small.yaml").write_text(FILE.replace("nets:mlp", "absent:mlp"))
    done = called("check", "small.yaml", "--debug", cwd=user)
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.slow
def test_a_refused_gate_shows_the_table_and_keeps_the_artifact(
    ran: Path, commands: Commands
) -> None:
    (ran / "small.yaml").write_text(FILE.replace("parity, atol: 1e-4", "max_size, ratio: 1e-4"))
    done = commands.call("run", "small.yaml", cwd=ran, first=BRIEFLY)
    assert done.returncode == 3
    assert "✗ export_onnx" in done.stdout
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "export_onnx: max_size" in error
    assert "Traceback" not in done.stderr
    assert (ran / "runs/small/artifacts/export_onnx/model.onnx").exists()
    assert "refused" in (ran / "runs/small/report.json").read_text()


def test_a_missing_java_stops_only_the_packaging(
    ran: Path, called: Callable, hide_java: Callable[[], None]
) -> None:
    (ran / "small.yaml").write_text(FILE + "  - {stage: package_torchserve}\n")
    hide_java()
    done = called("run", "small.yaml", cwd=ran)
    assert done.returncode == 4, done.stderr
    assert (
        "warning: package_torchserve will stop: needs java, which is not installed" in done.stderr
    )
    assert "error: package_torchserve: " in done.stderr
    artifacts = {p.name for p in (ran / "runs/small/artifacts").iterdir()}
    assert artifacts == {"source", "train", "export_onnx"}


@pytest.mark.slow
def test_control_c_in_training_resumes_to_the_same_weights(
    user: Path, called: Callable, commands: Commands
) -> None:
    (user / "nets.py").write_text(SLOW_NETS)
    (user / "small.yaml").write_text(FILE.replace("epochs: 2", "epochs: 20"))
    (user / "slow").touch()
    command = ("run", "small.yaml", "--until", "train")
    process = commands.start(*command, cwd=user, first=BRIEFLY)
    for line in process.stderr:
        if "epoch 5/20" in line:
            break
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "run the same command again to resume" in rest

    (user / "slow").unlink()
    resumed = commands.call(*command, cwd=user, first=BRIEFLY)
    assert resumed.returncode == 0, resumed.stderr
    assert "epoch 1/20" not in resumed.stderr
    weights = user / "runs/small/artifacts/train/weights.safetensors"
    first = weights.read_bytes()
    shutil.rmtree(user / "runs")
    assert called(*command, cwd=user).returncode == 0
    assert weights.read_bytes() == first


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.soak)],
)
def test_a_signal_in_training_is_an_interruption(
    user: Path, number: signal.Signals, code: int, commands: Commands
) -> None:
    (user / "nets.py").write_text(SLOW_NETS)
    (user / "small.yaml").write_text(FILE.replace("epochs: 2", "epochs: 400"))
    (user / "slow").touch()
    # What nohup ignores stays so in all that is started under it, these tests included.
    restored = f"import signal; signal.signal({number:d}, signal.SIG_DFL)"
    process = commands.start("run", "small.yaml", cwd=user, first=restored)
    for line in process.stderr:
        if "epoch 2/400" in line:
            break
    process.send_signal(number)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == code, rest
    assert rest.splitlines()[-1] == "interrupted at train; run the same command again to resume"
    assert "Traceback" not in rest
    report = json.loads((user / "runs/small/report.json").read_text())
    assert report["status"] == "interrupted"
    assert report["failed_stage"]["name"] == "train"


@pytest.mark.slow
@pytest.mark.parametrize(
    "disguise",
    ["ImportError('half a module')", pytest.param("RecursionError()", marks=pytest.mark.soak)],
)
def test_an_interruption_in_an_import_is_one_whatever_it_turns_into(
    user: Path, disguise: str, commands: Commands
) -> None:
    disturbed = (
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        f"except KeyboardInterrupt:\n    raise {disguise} from None\n"
    )
    (user / "nets.py").write_text(disturbed + NETS)
    done = commands.call("run", "small.yaml", cwd=user)
    assert done.returncode == 130
    assert done.stderr == "interrupted; run the same command again to resume\n"


def test_what_user_code_writes_never_gets_between_the_json(
    user: Path, called: Callable, commands: Commands
) -> None:
    noise = "import os\nprint('from print')\nos.system('echo from a program')\n"
    (user / "nets.py").write_text(noise + NETS)
    checked = commands.call("check", "small.yaml", "--json", cwd=user)
    assert json.loads(checked.stdout)["valid"] is True
    assert "from print" in checked.stderr
    assert "from a program" in checked.stderr
    (user / "nets.py").write_text(noise + NETS.replace("nn.Sequential", "nn.Sequentia"))
    assert called("run", "small.yaml", "--json", cwd=user).returncode == 2


@pytest.mark.slow
def test_a_failure_says_which_stage_failed(
    user: Path, called: Callable, commands: Commands
) -> None:
    diverging = FILE.replace("epochs: 2", "epochs: 2, learning_rate: 1.0e+30")
    (user / "small.yaml").write_text(diverging)
    done = commands.call("run", "small.yaml", cwd=user)
    assert done.returncode == 1
    assert "✗ failed" in done.stdout
    assert "stages cached" not in done.stdout
    printed = json.loads(called("run", "small.yaml", "--json", cwd=user).stdout)
    assert printed["failed_stage"]["name"] == "train"


def test_an_error_of_several_lines_is_said_in_one(user: Path, called: Callable) -> None:
    raising = "def data():\n    raise ValueError('first\\nsecond\\n\\nthird')\n"
    (user / "nets.py").write_text(NETS + raising)
    done = called("run", "small.yaml", cwd=user)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "first second third" in done.stderr


@pytest.mark.slow
def test_a_lesser_encoding_stops_nothing(ran: Path) -> None:
    (ran / "small.yaml").unlink()  # what is shown again needs none
    done = compress("report", "runs/small", cwd=ran, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def _on_a_terminal(*command: str | Path, cwd: Path, **environment: str) -> str:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    said = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(master, 4096):
            said += chunk
    os.close(master)
    process.wait(150)
    return said.decode()


@pytest.mark.slow
def test_colours_and_bars_are_left_out_where_they_are_not_wanted(
    user: Path, commands: Commands
) -> None:
    commands.write_program(program := user / "compress")
    check = (program, "check", "absent.yaml")
    assert "\x1b[" in _on_a_terminal(*check, cwd=user, TERM="xterm", NO_COLOR="")
    said = _on_a_terminal(*check, cwd=user, TERM="xterm", NO_COLOR="1")
    assert "error: absent.yaml" in said
    assert "\x1b" not in said
    run = (program, "run", "small.yaml", "--until", "train")
    said = _on_a_terminal(*run, cwd=user, TERM="dumb", NO_COLOR="")
    assert "epoch 2/2" in said
    assert "\x1b" not in said


def _read_by(reader: str, *command: str, cwd: Path) -> tuple[int, str]:
    """Pipe both outputs of a command into another; return the command's exit code and what came."""
    line = f"{{ {shlex.join(command)}; echo $? > code; }} 2>&1 | {reader}"
    done = subprocess.run(line, shell=True, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return int((cwd / "code").read_text()), done.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_early_changes_nothing(ran: Path, commands: Commands) -> None:
    commands.write_program(ran / "compress", first=BRIEFLY)
    refused = FILE.replace("parity, atol: 1e-4", "max_size, ratio: 1e-4")
    (ran / "small.yaml").write_text(refused)
    code, said = _read_by("head -1", "./compress", "run", "small.yaml", cwd=ran)
    assert (code, len(said.splitlines())) == (3, 1)
    assert json.loads((ran / "runs/small/report.json").read_text())["status"] == "refused"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("schema", 0),
        pytest.param("--help", 0, marks=pytest.mark.soak),
        pytest.param("check small.yaml --quick", 0, marks=pytest.mark.soak),
        ("check absent.yaml", 2),
    ],
)
def test_a_reader_that_is_gone_leaves_the_exit_code(user: Path, command: str, code: int) -> None:
    assert _read_by("true", *COMPRESS, *command.split(), cwd=user) == (code, "")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_unwritable_store_on_a_rerun_is_one_line(user: Path) -> None:
    compress("run", "small.yaml", cwd=user)
    for folder in (user / "runs/small", user / "runs/small/artifacts"):
        folder.chmod(0o555)
    done = compress("run", "small.yaml", cwd=user)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--out" in done.stderr


@pytest.mark.slow
def test_init_asks_on_a_terminal_and_what_it_writes_is_valid(user: Path, called: Callable) -> None:
    master, slave = pty.openpty()
    os.write(master, b"nets\nnets:mlp\n\nnets:data\n\nsmaller\n")
    done = subprocess.run(
        [*COMPRESS, "init"], cwd=user, stdin=slave, capture_output=True, text=True, timeout=120
    )
    os.close(slave)
    os.close(master)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Which model shall be compressed") == 2
    assert done.stdout.endswith("next: compress run pipeline.yaml\n")
    assert "factory: nets:mlp" in (user / "pipeline.yaml").read_text()
    assert called("check", "pipeline.yaml", cwd=user).returncode == 0
    again = called("init", "--model", "nets:mlp", "--data", "nets:data", cwd=user)
    assert again.returncode == 2
    assert "pipeline.yaml exists and is not overwritten" in again.stderr


def test_help_cuts_no_description_off(tmp_path: Path) -> None:
    commands = compress("--help", cwd=tmp_path, COLUMNS="80").stdout.partition("Commands:")[2]
    assert "verify" in commands
    assert "..." not in commands


def test_the_committed_schema_is_the_codes(tmp_path: Path) -> None:
    printed = json.loads(compress("schema", cwd=tmp_path).stdout)
    committed = json.loads((ROOT / "pipelines" / "pipeline.schema.json").read_text())
    assert printed == committed, "run: compress schema > pipelines/pipeline.schema.json"
