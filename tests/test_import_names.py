"""The toolkit from a wheel as README shows it, and beside users' files of its folders' names."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.pipelines.conftest import BRIEFLY
from tests.serve.served_here import TOKEN, serving

ROOT = Path(__file__).parents[1]
USER_CODE = {
    "export.py": """\
from torch import nn
WIDTH = 4
def network():
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
""",
    "serve.py": "SEED = 7\n",
    "pipelines.py": """\
import torch
from torch.utils.data import TensorDataset
import serve
from export import WIDTH, network
def data():
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(serve.SEED))
    return {"val": TensorDataset(x, network()(x).argmax(1))}
""",
    "cli.py": "from pipelines import data\nROWS = len(data()['val'])\n",
    "script.py": """\
import torch
import cli, pipelines, serve
from export import WIDTH, network
import compress
from compress.export import ExportTorchScript
from compress.serve import Client
from compress.pipelines import Pipeline
x = torch.randn(2, WIDTH)
made = compress.export_torchscript(network(), example_inputs=(x,), out="made")
assert made.kind == "torchscript" and cli.ROWS == 64 and serve.SEED == 7
print([m.__file__.rpartition("/")[2] for m in (cli, pipelines, serve)], compress.__file__)
""",
}
NET = """\
import torch
from torch.utils.data import TensorDataset
def network():
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
def splits():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return {"train": TensorDataset(x[:192], y[:192]), "val": TensorDataset(x[192:], y[192:])}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with this toolkit's wheel, and the packages that are installed here."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "wheels"]
    subprocess.run(build, check=True, capture_output=True, cwd=ROOT, timeout=120)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (packages,) = (folder / "env").glob("lib/*/site-packages")
    with zipfile.ZipFile(*(folder / "wheels").glob("*.whl")) as wheel:
        wheel.extractall(packages)
    # A folder named by a .pth file is no site: what is installed there to be edited is not found.
    (packages / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "env" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["clone", "wheel"])
def test_users_files_may_have_the_names_of_our_folders(
    place: str, installed: Path, tmp_path: Path
) -> None:
    python = Path(sys.executable) if place == "clone" else installed
    for name, text in USER_CODE.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [python, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "['cli.py', 'pipelines.py', 'serve.py']" in done.stdout
    assert str(ROOT / "compress" if place == "clone" else installed.parents[1]) in done.stdout


@pytest.mark.slow
def test_the_wheel_holds_one_name(installed: Path) -> None:
    code = (
        "import importlib.metadata as m; f = m.files('compress-pipeline')\n"
        "print(sorted({p.parts[0] for p in f if 'dist-info' not in p.parts[0]}))"
    )
    printed = subprocess.run([installed, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "['compress']"


@pytest.mark.slow
def test_the_readmes_way_without_a_clone(installed: Path, tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Install\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^    compress (.*)", section, re.MULTILINE)
    init, run, (serve, artifact) = (shlex.split(command, comments=True) for command in commands)
    assert serve == "serve"
    # Beside files of our folders' names; `run` starts what else has a search path.
    for name, text in {
        **USER_CODE,
        "net.py": f"import cli, export, pipelines, serve\n{NET}",
    }.items():
        (tmp_path / name).write_text(text)
    (command := tmp_path / "bin").mkdir()
    (command / "compress.py").write_text("from compress.cli import main\nmain()\n")
    # As the command that pip writes: its own folder leads sys.path, not the user's.
    entry = [str(installed), "-P", str(command / "compress.py")]
    (command / "briefly.py").write_text(f"{BRIEFLY}from compress.cli import main\nmain()\n")
    briefly = [str(installed), "-P", str(command / "briefly.py")]
    # `--goal smaller`, as its gates ask for no speed, which a busy machine cannot measure.
    for arguments in ([*entry, *init, "--goal", "smaller"], [*briefly, *run]):
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
    with serving(tmp_path / artifact, command=entry) as server:
        environment = {**os.environ, "COMPRESS_SERVE_TOKEN": TOKEN}
        asked = ["sh", "-c", server.curl]
        answer = json.loads(subprocess.check_output(asked, env=environment, timeout=60))
    (output,) = answer["outputs"]
    assert (output["shape"], output["datatype"]) == ([1, 2], "FP32")
    # What is missing is named as it can be added here.
    doctor = subprocess.run([*entry, "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert "extra mlflow: without mlflow; pip install 'compress-pipeline[mlflow]'" in doctor.stdout
