"""Named processors in emulation, as devices."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed, Unavailable, describe_exit_code
from compress.common.requirements import Requirement
from compress.export.common import remote_session
from compress.export.common.remote_device import RemoteDevice
from compress.export.emulation.sysroot import ARM, X86, Architecture, Sysroot, find_sysroot, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

START = "import sys; sys.path += sys.argv[1:]; import {module}; {module}.serve()".format(
    module=remote_session.__name__.rpartition(".")[2]
)
"""What the far end runs: this toolkit's module, without the toolkit."""


class PreparedSysroot(Requirement):
    """What an emulated processor needs, in the user's cache."""

    def missing(self) -> bool:
        """Whether it was not fetched for this onnxruntime."""
        return find_sysroot(PROCESSORS[self.what].architecture) is None


class EmulatedProcessor(RemoteDevice):
    """A processor that QEMU emulates: onnxruntime chooses its kernels as on the real one."""

    reads_files = True

    def __init__(self, name: str, architecture: Architecture, cpu: str, about: str) -> None:
        super().__init__()
        self.name, self.architecture, self.cpu = name, architecture, cpu
        self.title = f"{name} ({about}), emulated"
        install = f"compress devices --prepare {name}"
        self.requirements = (PreparedSysroot(what=name, install=install),)

    @property
    def version(self) -> str:
        """The CPU's name in QEMU, and the digest of everything that was fetched."""
        sysroot = find_sysroot(self.architecture)
        return f"{self.cpu} {sysroot.digest if sysroot else ''}"

    def prepare(self, qemu: Path | None, announce: Callable[[str], None]) -> None:
        """Fetch Python and onnxruntime for the instruction set, and QEMU."""
        prepare(self.architecture, self.cpu, qemu, announce)

    def start(self) -> EmulatedProcess:
        """Start Python and onnxruntime in QEMU."""
        if (sysroot := find_sysroot(self.architecture)) is None:
            raise Unavailable(f"on {self.name}: {self.requirements[0].problem}")
        return EmulatedProcess(sysroot, self.cpu, self.title)


class EmulatedProcess:
    """Python in QEMU, which answers frames on pipes."""

    def __init__(self, sysroot: Sysroot, cpu: str, title: str) -> None:
        self._title, self._log = title, tempfile.TemporaryFile()  # noqa: SIM115 - kept open
        module = str(Path(remote_session.__file__).parent)
        # It ends with this process, whose end closes its standard input.
        self._process = subprocess.Popen(
            [*sysroot.python(cpu), "-c", START, str(sysroot.packages), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={},
        )

    def exchange(self, frame: bytes, deadline_s: float) -> bytes:
        """Return the answer to a frame."""
        process, reply, late = self._process, None, threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(deadline_s, give_up)
        timer.start()
        try:
            with suppress(OSError):  # it has ended
                remote_session.write_frame(process.stdin, frame)  # type: ignore[arg-type]
                reply = remote_session.read_frame(process.stdout)  # type: ignore[arg-type]
        finally:
            timer.cancel()
        if reply is not None:
            return reply
        if late.is_set():
            raise StageFailed(f"{self._title} answered nothing within {deadline_s:g} s")
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        code = process.wait()
        self._log.seek(0)
        *_, last = "", *self._log.read().decode(errors="replace").splitlines()
        raise StageFailed(f"{self._title} {describe_exit_code(code)}: {last}")

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()


PROCESSORS: dict[str, EmulatedProcessor] = {
    processor.name: processor
    for processor in (
        EmulatedProcessor("cortex-a53", ARM, "cortex-a53", "Arm v8.0: no dot products"),
        EmulatedProcessor("cortex-a72", ARM, "cortex-a72", "Arm v8.0: no dot products"),
        EmulatedProcessor("neoverse-n1", ARM, "neoverse-n1", "Arm v8.2: dot products, float16"),
        EmulatedProcessor("aarch64-max", ARM, "max", "all of Arm that QEMU knows, with SVE"),
        EmulatedProcessor("x86-64-v2", X86, "Nehalem", "SSE4.2"),
        EmulatedProcessor("x86-64-v3", X86, "Haswell", "AVX2, no VNNI"),
    )
}
