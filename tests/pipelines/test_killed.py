"""Runs that are killed at any moment, and end as if nobody had."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.conftest import NETS

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "50"))
"""How often `make soak` kills a run."""
KILLS_IN_CI = 2
SEED = int(os.environ.get("KILL_SEED", "2"))
FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data", arguments: {shift: 0.0}}
stages:
  - {stage: train, epochs: 4, batch_size: 24, checkpoints: {every_steps: 2}}
  - {stage: export_onnx}
"""
LONGER = FILE.replace(
    "  - {stage: exp", "  - {stage: quantize_static, calibration_samples: 64}\n  - {stage: exp"
)
LONGER += "  - {stage: package_torchserve, gates: []}\n"
"""Artifacts of all stages are written alike; `make soak` kills quantization and packaging, too."""
RANKS = FILE[: FILE.index("  - {stage: exp")].replace(
    "batch_size: 24", "batch_size: 24, parallel: {strategy: ddp, processes: 2}"
)


def _killed(folder: Path, file: str, kills: int) -> dict:
    """Run a pipeline, killed so many times, and return what came of it; it is compared there."""
    (folder / "nets.py").write_text(NETS.replace(', "test": slice(180, 240)', ""))
    (folder / "small.yaml").write_text(file)
    print(f"KILLS={kills} KILL_SEED={SEED}")
    script = ROOT / "tests" / "pipelines" / "killing.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(SEED), str(kills)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"KILL_SEED={SEED}: {done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * max(KILLS, KILLS_IN_CI))
@pytest.mark.parametrize("kills", [KILLS_IN_CI, pytest.param(KILLS, marks=pytest.mark.soak)])
def test_runs_killed_anywhere_end_like_an_uninterrupted_one(tmp_path, kills: int) -> None:
    found = _killed(tmp_path, FILE if kills == KILLS_IN_CI else LONGER, kills)
    assert len(found["at"]) >= kills and found["completed"] >= 1
    assert found["resumed"] >= 1, "no training was taken up from a checkpoint"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(60 + 60 * KILLS)
def test_runs_killed_with_or_without_their_ranks_end_like_an_uninterrupted_one(tmp_path) -> None:
    found = _killed(tmp_path, RANKS, KILLS // 10)
    assert {"runner", "rank"} & set(found["struck"])
