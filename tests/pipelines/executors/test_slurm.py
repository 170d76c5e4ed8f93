"""The batch script, run by programs that stand in for Slurm's and start its tasks here."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.pipelines.executors.slurm import Cluster, unmet_settings, write_script

ROOT = Path(__file__).parents[3]

PROGRAMS = {
    "compress": f"""#!/bin/bash
export PYTHONPATH={ROOT} OMP_NUM_THREADS=1
exec {sys.executable} -m compress.cli "$@"
""",
    # Two tasks; a signal of scancel's reaches both.
    "srun": """#!/bin/bash
echo "srun $SRUN_CPUS_PER_TASK $1" >> calls
shift
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 SLURM_LOCALID=0
export SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
SLURM_PROCID=0 "$@" & first=$!
SLURM_PROCID=1 "$@" & second=$!
echo "$first $second" > tasks
wait "$first"; one=$?
wait "$second"; two=$?
exit $(( one > two ? one : two ))
""",
    "scontrol": """#!/bin/bash
echo "scontrol $*" >> calls
[ "$1" = show ] && printf '127.0.0.1\\nsecond\\n'
exit 0
""",
    "scancel": """#!/bin/bash
echo "scancel $*" >> calls
kill -TERM $(cat tasks)
""",
}
NETS = """
import os, time
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.02 if os.path.exists("slow") else 0)
        return super().__getitem__(index)

def data():
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return {"train": Slow(x[:64], y[:64]), "val": TensorDataset(x[64:], y[64:])}
"""
FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data"}
stages:
  - stage: train
    epochs: 4
    batch_size: 16
    parallel: {nodes: 2, processes: 1}
  - {stage: prune_weights, amount: 0.5}
"""
TWO = Cluster(nodes=2)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "small.yaml").write_text(FILE)
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def submitted(user: Path, job: int = 4711, **more: str) -> subprocess.Popen[str]:
    environment = {
        "PATH": f"{user / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "8",
        **more,
    }
    return subprocess.Popen(
        ["bash", "compress.sbatch"],
        cwd=user,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def script(user: Path, cluster: Cluster = TWO, out: str = "runs/small") -> Path:
    write_script(user / "compress.sbatch", Path("small.yaml"), Path(out), cluster)
    return user / "compress.sbatch"


@pytest.mark.soak
@pytest.mark.multiprocess
def test_a_job_on_two_nodes_whose_time_is_up_is_queued_again_and_goes_on(user):
    script(user, out="the run's directory")
    (user / "slow").touch()
    job = submitted(user)
    for line in job.stdout:
        if "epoch 1/4" in line:
            job.send_signal(signal.SIGUSR1)
            break
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 143, said
    assert "interrupted at train; run the same command again to resume" in said
    calls = (user / "calls").read_text().splitlines()
    assert calls[0] == "srun 8 --kill-on-bad-exit=1"
    assert calls[1:3] == ["scontrol show hostnames node[1-2]"] * 2, "each task asks for the first"
    assert calls[3:] == ["scancel --signal=TERM 4711", "scontrol requeue 4711"]
    (user / "slow").unlink()
    job = submitted(user, SLURM_RESTART_COUNT="1")
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0, said
    assert "resumed after epoch" in said
    pruned = user / "the run's directory" / "artifacts" / "prune_weights"
    assert (pruned / "weights.safetensors").is_file()


def test_the_script_is_bash_and_asks_for_what_was_said(user):
    file = script(user, Cluster(nodes=3, gpus_per_node=4, hours=2))
    subprocess.run(["bash", "-n", file], check=True)
    lines = [line.split()[1] for line in file.read_text().splitlines() if "#SBATCH" in line]
    expected = "nodes=3 ntasks-per-node=1 gpus-per-node=4 cpus-per-task=32 time=2:00:00"
    assert {f"--{option}" for option in expected.split()} <= set(lines)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", file], check=True)


def test_without_gpus_none_is_asked_for(user):
    text = script(user).read_text()
    assert "gpus" not in text
    assert "#SBATCH --cpus-per-task=8\n" in text


def test_a_script_that_is_there_is_not_overwritten(user):
    script(user).write_text("mine")
    with pytest.raises(PipelineInvalid, match="exists and is not overwritten"):
        script(user)
    assert (user / "compress.sbatch").read_text() == "mine"


def test_what_the_pipeline_lacks_is_said(user):
    file = user / "small.yaml"
    assert list(unmet_settings(file, TWO)) == []
    (line,) = unmet_settings(file, Cluster())
    assert line.endswith("stage train: put parallel: {nodes: 1, processes: 1}")
    train, device = unmet_settings(file, Cluster(nodes=2, gpus_per_node=4))
    assert train.endswith("stage train: put parallel: {nodes: 2, processes: 4}")
    assert "put device: cuda" in device
    (line,) = unmet_settings(user / "later.yaml", TWO)
    assert "later.yaml is not there yet; give its trainings parallel: {nodes: 2" in line


@pytest.mark.slow
def test_the_command_writes_it(user, commands):
    commands.write_program(user / "bin" / "compress")

    def init(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [user / "bin" / "compress", "init", *arguments]
        return subprocess.run(command, cwd=user, capture_output=True, text=True, timeout=120)

    done = init()
    assert done.returncode == 2
    assert "needs a model: a Hugging Face folder" in done.stderr
    assert "(or --slurm for a batch script)" in done.stderr
    done = init("small.yaml", "--slurm", "--nodes", "2", "--gpus-per-node", "8")
    assert done.returncode == 0, done.stderr
    assert "to do: small.yaml, stage train: put parallel: {nodes: 2, processes: 8" in done.stderr
    assert "sbatch compress.sbatch" in done.stdout
    assert "OUT=runs/small " in (user / "compress.sbatch").read_text()
    again = init("small.yaml", "--slurm")
    assert (again.returncode, again.stdout) == (2, "")
