"""What the history says of a step's bytes is what the kernel counts on the wire."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def namespaces_are_allowed() -> bool:
    try:
        made = subprocess.run(
            ["unshare", "--map-root-user", "--net", "ip", "link", "add", "type", "veth"],
            capture_output=True,
        )
    except FileNotFoundError:
        return False
    return made.returncode == 0


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not namespaces_are_allowed(), reason="needs network namespaces and veth")
def test_the_kernel_counts_what_the_history_says():
    done = subprocess.run(
        [sys.executable, "benchmarks/training.py", "wire"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    ratios = dict(re.findall(r"^(\w.*?) +\d+ +\d+ +(\d\.\d+)$", done.stdout, re.MULTILINE))
    assert {"ddp", "ddp, topk", "zero1", "zero2", "zero3", "fsdp, no_shard"} <= ratios.keys()
    # Headers, and each step's loss and count of labels.
    assert all(1 <= float(ratio) < 1.05 for ratio in ratios.values()), done.stdout
