"""What a TensorRT engine is bound to, and whether this host has it; imports are in functions."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from compress.common.errors import Unavailable
from compress.export.common.host_check import CUDA

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EXACT = {"tensorrt": "TensorRT", "gpu": "the GPU", "compute_capability": "compute capability"}
"""Facts that must be equal, and their names in messages; a newer driver runs older engines."""


def built_for(device: str = "cuda:0") -> dict[str, str]:
    """Return what an engine built here needs: GPU, driver and TensorRT."""
    import torch

    try:
        import tensorrt
    except ImportError as error:
        raise Unavailable(f"TensorRT cannot be imported: {error}") from error
    if CUDA.missing():
        raise Unavailable("TensorRT needs a CUDA device, and there is none here")
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "compute_capability": f"{major}.{minor}",
        "driver": driver(),
        "tensorrt": tensorrt.__version__,
        "cuda": str(torch.version.cuda),
    }


def driver() -> str:
    """Return the version of the NVIDIA driver; empty where nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def refuse_other_host(needed: Mapping[str, str], file: Path, device: str) -> None:
    """Raise Unavailable for an engine that was built for another machine; name what differs."""
    wanted = f"built for {needed['gpu']} with TensorRT {needed['tensorrt']}"
    try:
        here = built_for(device)
    except Unavailable as error:
        raise Unavailable(f"{file}: {wanted}: {error}") from error
    mismatch = difference(needed, here)
    if mismatch:
        raise Unavailable(f"{file}: built for {mismatch}; run export_tensorrt here")


def difference(needed: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Return the first thing that differs from what an engine needs; empty where nothing does."""
    for key, name in EXACT.items():
        if needed[key] != here[key]:
            return f"{name} {needed[key]}, found {here[key]}"
    if (
        needed["driver"]
        and here["driver"]
        and _numbers(here["driver"]) < _numbers(needed["driver"])
    ):
        return f"driver {needed['driver']} or newer, found {here['driver']}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
