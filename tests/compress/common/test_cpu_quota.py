"""How many cores a process may use, where a container limits them."""

import os
from pathlib import Path

import pytest
import torch

from compress.common.process import cpu_quota, threads_to_use, usable_cores, within_quota


def system(folder: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write what Linux tells of control groups."""
    (folder / "own").write_text(own)
    for name, content in files.items():
        file = folder / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder / "own", folder / "mounted"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/pod/app\n", {"pod/app/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/pod/app\n", {"pod/app/cpu.max": "max 100000\n"}, None),
        (
            "0::/pod/app\n",
            {"pod/app/cpu.max": "max 100000\n", "pod/cpu.max": "150000 50000\n"},
            3.0,
        ),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        # A container sees its own group as the root, and the path as the machine has it.
        (
            "4:cpu,cpuacct:/docker/ab\n1:name=systemd:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        (
            "2:cpuacct:/\n1:cpu:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("3:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "1", "a/cpu.max": "1 2"}, None),
        ("no groups", {}, None),
    ],
)
def test_a_quota_is_the_least_of_those_around(
    tmp_path: Path, own: str, files: dict[str, str], expected: float | None
) -> None:
    assert cpu_quota(*system(tmp_path, own, files)) == expected
    assert cpu_quota(tmp_path / "nowhere") is None


def test_affinity_and_quota_limit_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allowed = len(os.sched_getaffinity(0))
    for quota, expected in ((None, allowed), (0.5, 1), (allowed + 7.0, allowed)):
        monkeypatch.setattr("compress.common.process.cpu_quota", lambda quota=quota: quota)
        assert usable_cores() == threads_to_use() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    assert threads_to_use() == 7


def test_torch_computes_with_no_more_threads_than_the_quota_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("compress.common.process.cpu_quota", lambda: 0.5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with within_quota():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with within_quota():
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
