"""Named processors in emulation, as devices."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed, describe_exit_code
from compress.common.requirements import Requirement
from compress.export.common import remote_session
from compress.export.common.remote_device import RemoteDevice
from compress.export.emulation.sysroot import PACKAGES, find_sysroot, prepare, python_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    reads_files = True

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

    def start(self) -> PythonProcess:
        """Start Python and onnxruntime in QEMU."""
        folder = find_sysroot(self.architecture)
        assert folder is not None  # it is one of the requirements
        python = python_command(folder, self.architecture, self.cpu)
        return PythonProcess(self.title, [*python, *START, str(folder / PACKAGES)])


class PythonProcess:
    """A Python that answers frames on pipes."""

    def __init__(self, title: str, command: Sequence[str]) -> None:
        self._title, self._log = title, tempfile.TemporaryFile()  # noqa: SIM115 - kept open
        # It ends with this process, whose end closes its standard input.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, env={})

    def exchange(self, frame: bytes, deadline_s: float) -> bytes:
        """Return the answer to a frame."""
        process, reply = self._process, None
        timer = threading.Timer(deadline_s, process.kill)
        timer.start()
        try:
            with suppress(OSError):  # it has ended
                remote_session.write_frame(process.stdin, frame)  # type: ignore[arg-type]
                reply = remote_session.read_frame(process.stdout)  # type: ignore[arg-type]
        finally:
            timer.cancel()  # or Ctrl-C would leave this process waiting for it
        if reply is not None:
            return reply
        self._log.seek(0)
        *_, last = "", *self._log.read().decode(errors="replace").splitlines()
        ended = describe_exit_code(process.wait(deadline_s))
        raise StageFailed(f"{self._title}: {ended}, or took over {deadline_s:g} s; {last}")

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()


PROCESSORS: dict[str, EmulatedProcessor] = {
    processor.name: processor
    for processor in (
        EmulatedProcessor("cortex-a53", "aarch64", "cortex-a53", "Arm v8.0: no dot products"),
        EmulatedProcessor("cortex-a72", "aarch64", "cortex-a72", "Arm v8.0: no dot products"),
        EmulatedProcessor(
            "neoverse-n1", "aarch64", "neoverse-n1", "Arm v8.2: dot products, float16"
        ),
        EmulatedProcessor("aarch64-max", "aarch64", "max", "all of Arm that QEMU knows, with SVE"),
        EmulatedProcessor("x86-64-v2", "x86_64", "Nehalem", "SSE4.2"),
        EmulatedProcessor("x86-64-v3", "x86_64", "Haswell", "AVX2, no VNNI"),
    )
}
