"""Named processors in emulation, as devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compress.common.requirements import Requirement
from compress.export.common import remote_session
from compress.export.common.remote_device import FarEnd, RemoteDevice
from compress.export.emulation.sysroot import PACKAGES, find_sysroot, prepare, python_command

if TYPE_CHECKING:
    from collections.abc import Callable

START = (
    *("-c", "import sys; sys.path += sys.argv[1:]; import remote_session; remote_session.serve()"),
    str(Path(remote_session.__file__).parent),
)
"""Arguments of the Python at the far end: it runs that module, without the rest of the toolkit."""


class PreparedSysroot(Requirement):
    """What an emulated processor needs, in the user's cache."""

    architecture: str

    def missing(self) -> bool:
        """Whether it was not fetched for this onnxruntime."""
        return find_sysroot(self.architecture) is None


class EmulatedProcessor(RemoteDevice):
    """A processor that QEMU emulates: onnxruntime chooses its kernels as on the real one."""

    def __init__(self, name: str, architecture: str, cpu: str, about: str) -> None:
        super().__init__()
        self.name, self.architecture, self.cpu = name, architecture, cpu
        self.title = f"{name} ({about}), emulated"
        command = f"compress devices --prepare {name}"
        need = PreparedSysroot(
            what=f"{name} in emulation", install=command, architecture=architecture
        )
        self.requirements = (need,)

    @property
    def version(self) -> str:
        """The CPU's name in QEMU, and the digest of everything that was fetched."""
        folder = find_sysroot(self.architecture)
        return f"{self.cpu} {folder.name if folder else ''}"

    def prepare(self, qemu: Path | None, announce: Callable[[str], None]) -> None:
        """Fetch Python and onnxruntime for the instruction set, and QEMU."""
        prepare(self.architecture, self.cpu, qemu, announce)

    def start(self) -> FarEnd:
        """Start Python and onnxruntime in QEMU."""
        folder = find_sysroot(self.architecture)
        assert folder is not None  # it is one of the requirements
        python = python_command(folder, self.architecture, self.cpu)
        return FarEnd(self.title, [*python, *START, str(folder / PACKAGES)], env={})


# Pointers are signed by a hash of QEMU's own, which is cheaper to emulate than Arm's.
MAX = "max,pauth-impdef=on"
PROCESSORS = {
    name: EmulatedProcessor(name, architecture, cpu, about)
    for name, architecture, cpu, about in (
        ("cortex-a53", "aarch64", "cortex-a53", "Arm v8.0: no dot products"),
        ("cortex-a72", "aarch64", "cortex-a72", "Arm v8.0: no dot products"),
        ("neoverse-n1", "aarch64", "neoverse-n1", "Arm v8.2: dot products, float16"),
        ("aarch64-max", "aarch64", MAX, "all of Arm that QEMU knows, with SVE"),
        ("x86-64-v2", "x86_64", "Nehalem", "SSE4.2"),
        ("x86-64-v3", "x86_64", "Haswell", "AVX2, no VNNI"),
    )
}
