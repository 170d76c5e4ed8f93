"""`compress doctor`: versions, hardware, programs, and the packages that stages lack."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distributions, metadata
from typing import Any

from compress.common.config import Settings
from compress.common.errors import exits_refused, first_line
from compress.common.process import usable_cores
from compress.common.requirements import COMPILER, DISTRIBUTION, JAVA, Requirement, pip_install
from compress.core.devices import devices
from compress.core.gates.gate import gate_classes
from compress.pipelines.config.model_spec import TIMM
from compress.pipelines.config.registry import stages
from compress.pipelines.system.machine_info import machine, versions

INSTALL_OF_EXTRA = {"timm": TIMM.install}
"""How to install an extra, where the extra itself would install more than is good."""
IMPORTED = {
    "torch": "; pip install 'torch<2.16', with the --index-url that pytorch.org gives for a build "
    "without CUDA",
    # A build for another torch stops transformers.
    "torchvision": ", and then neither can models of transformers and timm, which do without it: "
    "pip uninstall torchvision, or install it from the index that torch came from",
}
"""Packages whose build may not fit: what follows, and what to do."""
PROGRAM_TIMEOUT_S = 10


class Findings(Settings):
    """Environment of this machine."""

    versions: dict[str, str]
    """Of Python, this toolkit and the libraries that shape an artifact."""
    extras: dict[str, tuple[str, ...]]
    """By extra: which of its packages are missing."""
    hardware: dict[str, str | int | float | None]
    programs: dict[str, str | None]
    """Version line by program name; None where it was not found."""
    cuda: tuple[str, ...]
    broken: dict[str, str]
    """Packages that cannot be imported, torch or those of another build: the error, what to do."""
    stages: dict[str, tuple[str, ...]]
    """Missing requirements by stage with default settings, gate or device: how to install them."""

    def lines(self) -> Iterator[str]:
        """Yield the findings as lines of text."""
        yield ", ".join(f"{name} {found}" for name, found in self.versions.items())
        instructions, threads = self.hardware["instructions"], self.hardware["threads"]
        yield (
            f"{self.hardware['processor']}{f' ({instructions})' if instructions else ''}, "
            f"{self.hardware['usable_cores']} of {self.hardware['cores']} cores, "
            f"{self.hardware['gibibytes']:.1f} GiB"
            f"{f'; PyTorch uses {threads} threads' if threads else ''}"
        )
        for name, found in self.programs.items():
            yield f"{name}: {found or 'not on the PATH'}"
        yield f"CUDA devices: {', '.join(self.cuda) or 'none'}"
        for extra, lacking in self.extras.items():
            if lacking:
                install = INSTALL_OF_EXTRA.get(extra, pip_install(extra))
                yield f"extra {extra}: without {', '.join(lacking)}; {install}"
            else:
                yield f"extra {extra}: installed"
        for name, problem in self.broken.items():
            yield f"✗ {name}: {problem}"
        for name, lacking in self.stages.items():
            yield f"{'✗' if lacking else '✓'} {name}{': ' if lacking else ''}{'; '.join(lacking)}"


def examine() -> Findings:
    """Inspect this machine; programs are only run with their version option."""
    broken: dict[str, str] = {}
    for name, advice in IMPORTED.items():
        try:
            if name == "torch" or importlib.util.find_spec(name):
                with exits_refused():
                    importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a mismatched build raises anything
            problem = f"{type(error).__name__}: {first_line(error)}"
            broken[name] = f"cannot be imported ({problem}){advice}"
    torch: Any = None if "torch" in broken else importlib.import_module("torch")
    cuda = torch and torch.cuda
    missing: dict[str, tuple[str, ...]] = {}
    for name, stage in stages().items():
        required = [key for key, field in stage.model_fields.items() if field.is_required()]
        unset: dict[str, Any] = dict.fromkeys(required)
        # Not validated: what must be set has no value here.
        missing[name] = _lacking(stage.model_construct(**unset).all_requirements(), torch)
    for name, gate in gate_classes().items():
        if needs := gate.model_construct(gate=name).requirements:
            missing[f"gate {name}"] = _lacking(needs, torch)
    for name, device in devices().items():
        missing[f"device {name}"] = _lacking(device.requirements, torch)
    return Findings(
        versions=versions(),
        extras=dict(_extras()),
        hardware={
            **machine(),
            "instructions": torch and torch.backends.cpu.get_cpu_capability(),
            "usable_cores": usable_cores(),
            "threads": torch and torch.get_num_threads(),
            "gibibytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
            "system": platform.platform(),
        },
        programs={
            program.what: _version_of_program(program, option)
            for program, option in ((JAVA, "-version"), (COMPILER, "--version"))
        },
        cuda=tuple(map(cuda.get_device_name, range(cuda.device_count()))) if torch else (),
        broken=broken,
        stages=missing,
    )


def _lacking(needs: Iterable[Requirement], torch: Any) -> tuple[str, ...]:
    if not torch:  # which asks for devices, too
        return ("needs torch",)
    return tuple(f"needs {need.what}; {need.install}" for need in needs if need.missing())


def _extras() -> Iterator[tuple[str, tuple[str, ...]]]:
    try:
        own = metadata(DISTRIBUTION)
    except PackageNotFoundError:  # a source tree on the path
        return
    needed = own.get_all("Requires-Dist") or []
    for extra in own.get_all("Provides-Extra") or []:
        of_extra = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
        packages = [re.split(r"[^\w.-]", n, maxsplit=1)[0] for n in needed if of_extra.search(n)]
        yield extra, tuple(p for p in dict.fromkeys(packages) if not any(distributions(name=p)))


def _version_of_program(program: Requirement, option: str) -> str | None:
    path = program.program_path()
    if path is None:
        return None
    try:
        result = subprocess.run(
            [path, option],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({type(error).__name__})"
    lines = (result.stdout + result.stderr).splitlines()  # java prints its version on stderr
    return lines[0] if lines else "prints nothing"
