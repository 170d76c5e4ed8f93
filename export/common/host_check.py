"""What compiled code is bound to, and whether this host has it; torch is imported in functions."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from compress.common.errors import Unavailable
from compress.common.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class CudaDevice(Requirement):
    """A graphics processor that PyTorch sees."""

    def missing(self) -> bool:
        """Whether there is none."""
        import torch

        return not torch.cuda.is_available()


CUDA = CudaDevice(what="a CUDA device", install="use `device: cpu`")


def built_for(device: str) -> dict[str, Any]:
    """Return what code compiled here for a device needs: a processor, a system, a PyTorch."""
    import torch

    host: dict[str, Any] = {
        "device": device,
        "system": platform.system(),
        "machine": platform.machine(),
        "torch": torch.__version__.partition("+")[0],
    }
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return host | {"compute_capability": f"{major}.{minor}", "cuda": torch.version.cuda}
    # Inductor compiles with `-march=native`, which may use any instruction of this processor.
    capabilities = torch.cpu.get_capabilities()
    return host | {
        "instructions": sorted(name for name, has in capabilities.items() if has is True)
    }


def refuse_other_host(needed: Mapping[str, Any], file: Path) -> None:
    """Raise Unavailable for code that was compiled for another machine; name what differs."""
    if needed["device"] == "cuda" and CUDA.missing():
        raise Unavailable(f"{file}: compiled for CUDA, and there is no CUDA device here")
    here = built_for(needed["device"])
    for name, value in needed.items():
        if isinstance(value, list):  # instruction sets, of which this host may have more
            lacking = sorted(set(value) - set(here[name]))
            problem = f"a processor with {', '.join(lacking)}, which this one has not"
            differs = bool(lacking)
        else:
            problem = f"{name.replace('_', ' ')} {value}, found {here[name]}"
            differs = here[name] != value
        if differs:
            raise Unavailable(f"{file}: compiled for {problem}; run export_aot here")
