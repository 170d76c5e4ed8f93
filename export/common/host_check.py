"""What compiled code is tied to, and whether that is here; no torch before it is asked."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from compress.common.errors import Unavailable
from compress.common.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class CudaDevice(Requirement):
    """A graphics processor that PyTorch sees."""

    def missing(self) -> bool:
        """Whether there is none."""
        import torch

        return not torch.cuda.is_available()

    def instead(self, advice: str) -> CudaDevice:
        """Return the same with another way out where there is none."""
        return self.model_copy(update={"install": advice})


CUDA = CudaDevice(what="a CUDA device", install="use `device: cpu`")


def refuse_missing(requirements: Sequence[Requirement], title: str) -> None:
    """Refuse to go on without something.

    Raises:
        Unavailable: it is not here.
    """
    for requirement in requirements:
        if requirement.missing():
            raise Unavailable(f"{title}: {requirement.what} is not here; {requirement.install}")


def built_for(device: str) -> dict[str, Any]:
    """Return what code compiled here for a device needs: a processor, a system, a PyTorch."""
    import torch

    needed: dict[str, Any] = {
        "device": device,
        "system": platform.system(),
        "machine": platform.machine(),
        "torch": torch.__version__.partition("+")[0],
    }
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        return needed | {"compute_capability": f"{major}.{minor}", "cuda": torch.version.cuda}
    # The compiler is told `-march=native`, and may use whatever this processor has.
    found = torch.cpu.get_capabilities()
    return needed | {"instructions": sorted(name for name, here in found.items() if here is True)}


def refuse_elsewhere(needed: Mapping[str, Any], file: Path) -> None:
    """Refuse code that was compiled for another machine.

    Raises:
        Unavailable: something is other here; the message names it.
    """
    if needed["device"] == "cuda" and CUDA.missing():
        raise Unavailable(f"{file}: compiled for CUDA, and there is no CUDA device here")
    here = built_for(needed["device"])
    for name, wanted in needed.items():
        lacking = sorted(set(wanted) - set(here[name])) if isinstance(wanted, list) else []
        if lacking:
            problem = f"a processor with {', '.join(lacking)}, which this one has not"
        elif not isinstance(wanted, list) and here[name] != wanted:
            problem = f"{name.replace('_', ' ')} {wanted}, found {here[name]}"
        else:
            continue
        raise Unavailable(f"{file}: compiled for {problem}; run export_aot here")
