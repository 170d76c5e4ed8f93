"""Architectures of timm: the real library, without torchvision where that is not installed."""

import importlib.util
from pathlib import Path

import pytest

HERE = "from compress.artifacts.libraries.timm_model import build, import_timm\n"
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="timm is not installed"
)


@pytest.mark.slow
@needs_timm
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
def test_architectures_are_built_without_torchvision_and_no_stand_in_stays(fresh_torch) -> None:
    answered = fresh_torch(
        HERE + "import importlib.util, sys, torch\n"
        "net = build('resnet10t', num_classes=3)\n"
        "print(*net(torch.zeros(2, 3, 64, 64)).shape)\n"
        "print([m for m in sys.modules if 'torchvision' in m], 'timm.data' in sys.modules)\n"
        "print(importlib.util.find_spec('torchvision'))\n"
        "try: import timm.data\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    assert answered.splitlines() == ["2 3", "[] False", "None", "No module named 'torchvision'"]


@pytest.mark.slow
@needs_timm
def test_a_torchvision_that_does_not_fit_is_one_line(tmp_path: Path, fresh_torch) -> None:
    broken = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision.py").write_text(broken)
    answered = fresh_torch(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        + HERE
        + "from compress.pipelines.commands.doctor import examine\n"
        "try: import_timm()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print(*[line for line in examine().lines() if 'torchvision' in line])\n"
    )
    refused, diagnosis = answered.splitlines()
    assert refused.startswith("Unavailable timm cannot be imported: RuntimeError: operator torchv")
    assert diagnosis.startswith("✗ torchvision: cannot be imported (RuntimeError: operator ")
