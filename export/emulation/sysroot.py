"""What emulation needs, fetched once into the user's cache: QEMU, Debian's Python, onnxruntime."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from compress.common.atomic_files import partial_folder, replace, sha256_of
from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import DISTRIBUTION

RELEASE = "trixie"
"""Debian 13: its QEMU is 10. That of Debian 12, 7.2, crashes onnxruntime."""
PACKAGES = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
WHEELS = ("onnxruntime", "numpy")
COMMAND_TIMEOUT_S = 1800
MANIFEST = "fetched.json"
DEBIAN_OF = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True)
class Architecture:
    """An instruction set, by the names that QEMU and wheels have for it."""

    name: str

    @property
    def debian(self) -> str:
        """Debian's name."""
        return DEBIAN_OF[self.name]

    @property
    def wheel_platforms(self) -> list[str]:
        """Tags of the wheels that its sysroot takes, newest first."""
        return [f"manylinux_2_{minor}_{self.name}" for minor in range(41, 16, -1)]


ARM, X86 = Architecture("aarch64"), Architecture("x86_64")


@dataclass(frozen=True)
class Sysroot:
    """A folder with the libraries of an instruction set, and the emulator for them."""

    folder: Path
    qemu: str
    digest: str
    """Of the names and hashes of everything in it."""

    @property
    def packages(self) -> Path:
        """Where wheels were unpacked."""
        return self.folder / "packages"

    def python(self, cpu: str) -> list[str]:
        """Return the command that starts its Python on a processor."""
        python = f"{self.folder}/usr/bin/python3"
        return [self.qemu, "-cpu", cpu, "-L", str(self.folder), python, "-IS"]


def cache_folder() -> Path:
    """Return the folder of all sysroots."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, DISTRIBUTION, "devices")


def find_sysroot(architecture: Architecture) -> Sysroot | None:
    """Return what was fetched last for this onnxruntime; None where nothing was, or it is gone."""
    files = cache_folder().glob(f"{architecture.name}-*/{MANIFEST}")
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        found = json.loads(file.read_text())
        if found["onnxruntime"] == version("onnxruntime") and Path(found["qemu"]).is_file():
            return Sysroot(file.parent, found["qemu"], file.parent.name.rpartition("-")[2])
    return None


def prepare(
    architecture: Architecture, cpu: str, qemu: Path | None, announce: Callable[[str], None]
) -> Sysroot:
    """Fetch everything by the user's apt and pip, and start it once on a processor.

    `qemu` is a QEMU of the user's; else Debian's is fetched. Raise Unavailable where apt knows no
    archive of Debian, StageFailed where a command fails. Nothing is kept of what fails.
    """
    cache = cache_folder()
    with partial_folder(cache / architecture.name) as folder:
        debs = fetch_debian_packages(architecture, qemu is None, folder / "debs")
        wheels = fetch_wheels(architecture, debs, folder / "wheels")
        fetched = {file.name: sha256_of(file) for file in sorted([*debs, *wheels])}
        for file in (*debs, *wheels):
            size = file.stat().st_size / 2**20
            announce(f"fetched {file.name}, {size:.1f} MiB, sha256 {fetched[file.name]}")
        root = folder / "root"
        _unpack(architecture, debs, wheels, root)
        fetched["qemu"] = sha256_of(qemu or root / f"usr/bin/qemu-{architecture.name}")
        manifest = json.dumps({"onnxruntime": version("onnxruntime"), "files": fetched}, indent=1)
        (root / MANIFEST).write_text(manifest)
        digest = sha256_of(root / MANIFEST)[:16]
        place = cache / f"{architecture.name}-{digest}"
        emulator = str(qemu.absolute() if qemu else place / f"usr/bin/qemu-{architecture.name}")
        (root / MANIFEST).write_text(
            json.dumps({**json.loads(manifest), "qemu": emulator}, indent=1)
        )
        here = Sysroot(root, str(qemu or root / f"usr/bin/qemu-{architecture.name}"), digest)
        # Python also writes its byte code then: importing takes a third of the time afterwards.
        start = f"import sys; sys.path.append({str(here.packages)!r}); import numpy, onnxruntime"
        _run([*here.python(cpu), "-c", start], env={})
        replace(root, place)
    return Sysroot(place, emulator, digest)


def fetch_debian_packages(architecture: Architecture, with_qemu: bool, folder: Path) -> list[Path]:
    """Download Python and its libraries for an architecture, and QEMU for this one."""
    host = DEBIAN_OF.get(platform.machine(), "")
    if not shutil.which("apt-get"):
        raise Unavailable("needs apt-get and dpkg-deb of Debian or Ubuntu, which are not here")
    listed = _run(["apt-get", "indextargets", "--format", "$(SITE) $(LABEL)"]).splitlines()
    archive = next((x.split()[0] for x in listed if x.endswith(" Debian")), "")
    if not archive:
        raise Unavailable(
            "apt knows no archive of Debian; add one to its sources, with its key, and run "
            "apt-get update"
        )
    (folder / "partial").mkdir(parents=True)
    (folder / "status").touch()  # nothing is installed, so that all dependencies are fetched
    (folder / "lists").mkdir()
    (folder / "sources").write_text(f"deb {archive} {RELEASE} main\n")
    settings = {
        "APT::Architecture": host,
        "APT::Architectures::": architecture.debian,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder,
        "Dir::Etc::sourcelist": folder / "sources",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": folder,
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
    }
    apt = ["apt-get", "-q", *(x for k, v in settings.items() for x in ("-o", f"{k}={v}"))]
    wanted = [f"{package}:{architecture.debian}" for package in PACKAGES]
    wanted += [f"qemu-user:{host}"] if with_qemu else []
    _run([*apt, "update"])
    _run([*apt, "install", "--yes", "--download-only", *wanted])
    # QEMU's own dependencies are installed here, or it does without.
    ends = (f"_{architecture.debian}.deb", "_all.deb")
    return sorted(x for x in folder.glob("*.deb") if x.name.endswith(ends) or _is_qemu(x))


def fetch_wheels(architecture: Architecture, debs: Sequence[Path], folder: Path) -> list[Path]:
    """Download onnxruntime and numpy of this environment's versions for Debian's Python."""
    python = next(d.name for d in debs if d.name.startswith("python3-minimal_")).split("_")[1]
    _run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--dest", str(folder)),
            *("--python-version", ".".join(python.split(".")[:2])),
            *(x for tag in architecture.wheel_platforms for x in ("--platform", tag)),
            *(f"{name}=={version(name)}" for name in WHEELS),
        ]
    )
    return sorted(folder.glob("*.whl"))


def _unpack(
    architecture: Architecture, debs: Sequence[Path], wheels: Sequence[Path], root: Path
) -> None:
    # Debian's files lie below /usr alone, and links lead there.
    (root / "usr/lib").mkdir(parents=True)
    for name in ("lib", "bin", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for deb in debs:
        if _is_qemu(deb):  # 60 emulators; one is needed
            files = [f"./usr/bin/qemu-{architecture.name}"]
            packed = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE)
            subprocess.run(["tar", "-xC", root, *files], stdin=packed.stdout, check=True)
        else:
            _run(["dpkg-deb", "--extract", str(deb), str(root)])
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root / "packages")


def _is_qemu(deb: Path) -> bool:
    return deb.name.startswith("qemu-user_")


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=env, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StageFailed(f"{command[0]}: {error}") from error
    if ran.returncode:
        *_, last = "", *ran.stderr.strip().splitlines()
        raise StageFailed(f"{' '.join(command[:2])} ended with {ran.returncode}: {last}")
    return ran.stdout
