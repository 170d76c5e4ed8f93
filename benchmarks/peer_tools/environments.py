"""An environment for each peer, made from pinned releases, and commands run in it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LONGEST_SECONDS = 1800
ORT = ("onnx==1.23.2", "onnxruntime==1.32.0")
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Cost:
    """What a command took, with its children."""

    cpu_seconds: float
    peak_mebibytes: float
    """Largest resident memory of one of its processes."""


@dataclass(frozen=True)
class Peer:
    """A tool, the script that runs it, and what its environment holds."""

    script: str
    requirements: tuple[str, ...]

    @property
    def release(self) -> str:
        """The tool itself, e.g. `nncf 3.4.0`."""
        return self.requirements[0].replace("==", " ")


PEERS = {
    "onnxruntime": Peer("onnxruntime_tools.py", (*reversed(ORT), "onnx-ir", "sympy")),
    "nncf": Peer("nncf_tool.py", ("nncf==3.4.0", *ORT, TORCH)),
    "neural_compressor": Peer(
        "neural_compressor_tool.py",
        # The last five are imported, and not among its own requirements.
        (
            *("onnx-neural-compressor==1.0", *ORT),
            *("prettytable", "psutil", "py-cpuinfo", "pydantic", "scipy"),
        ),
    ),
    "olive": Peer("olive_tool.py", ("olive-ai==0.13.0", *ORT, TORCH, "requests")),
    "onnxsim": Peer("onnxsim_tool.py", ("onnxsim==0.8.1", *ORT)),
    "mlserver": Peer("../server/mlserver_model.py", ("mlserver==1.7.1", ORT[1])),
    "litserve": Peer("../server/litserve_server.py", ("litserve==0.2.19", ORT[1])),
    "bentoml": Peer("../server/bentoml_service.py", ("bentoml==1.4.40", ORT[1])),
    "torchserve": Peer(
        "../server/torchserve_handler.py", ("torchserve==0.12.0", ORT[1], TORCH, "pyyaml")
    ),
    "torch_pruning": Peer("torch_pruning_tool.py", ("torch-pruning==1.6.1", TORCH)),
}


def environment(name: str, folder: Path) -> Path:
    """Return the Python of a peer's environment, which is made where it is not there yet."""
    root = folder / name
    python, complete = root / "bin" / "python", root / "complete"
    if not complete.exists():
        print(f"{name}: installing {' '.join(PEERS[name].requirements)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", root], check=True)
        install = [python, "-m", "pip", "install", "-q", *PEERS[name].requirements]
        subprocess.run(install, check=True, stderr=subprocess.DEVNULL)
        complete.touch()
    return python


def run_tool(name: str, folder: Path, settings: dict[str, Any]) -> float | str:
    """Run a peer's script; return the CPU seconds it took, or in a few words why it failed."""
    cost = tool_cost(name, folder, settings)
    return cost if isinstance(cost, str) else cost.cpu_seconds


def tool_cost(name: str, folder: Path, settings: dict[str, Any]) -> Cost | str:
    """Run a peer's script; return what it took, or in a few words why it failed."""
    file = Path(settings["output"]).with_suffix(".job.json")
    file.write_text(json.dumps(settings, default=str))
    return cost_of([environment(name, folder), HERE / PEERS[name].script, file], file.parent)


def cpu_seconds(command: list[Any], folder: Path) -> float | str:
    """Run a command; return its CPU seconds with its children's, or the last line that it wrote."""
    cost = cost_of(command, folder)
    return cost if isinstance(cost, str) else cost.cpu_seconds


def cost_of(command: list[Any], folder: Path) -> Cost | str:
    """Run a command; return what it took with its children, or the last line that it wrote."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as results:
        result = Path(results) / "cost.json"
        command = [sys.executable, "-S", HERE / "cost.py", result, *command]
        with subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        ) as process:
            try:
                output, errors = process.communicate(timeout=LONGEST_SECONDS)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # the command, and what it started
                if isinstance(error, subprocess.TimeoutExpired):
                    return f"took longer than {LONGEST_SECONDS} s"
                raise
        if process.returncode:
            return (errors.strip() or output.strip() or "no message").splitlines()[-1][:160]
        return Cost(*json.loads(result.read_text()))
