"""What emulation needs, fetched once into the user's cache: QEMU, Debian's Python, onnxruntime."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from compress.common.atomic_files import partial_folder, replace, sha256_of, user_cache_folder
from compress.common.errors import StageFailed, Unavailable, describe_exit_code

RELEASE = "trixie"
"""Debian 13: its QEMU is 10. That of Debian 12, 7.2, crashes onnxruntime."""
DEBS = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
WHEELS = ("onnxruntime", "numpy")
QEMU = "qemu-user_"  # how its package's file name begins
COMMAND_TIMEOUT_S = 1800
MANIFEST, PACKAGES = "fetched.json", "packages"
DEBIAN_OF = {"x86_64": "amd64", "aarch64": "arm64"}
"""An instruction set's name → Debian's."""


def cache_folder() -> Path:
    """Return the folder of all sysroots."""
    return user_cache_folder() / "devices"


def find_sysroot(architecture: str) -> Path | None:
    """Return the folder that was prepared last for this onnxruntime; None where there is none."""
    files = cache_folder().glob(f"{architecture}-*/{MANIFEST}")
    usable = [
        f for f in files if json.loads(f.read_text())["onnxruntime"] == version("onnxruntime")
    ]
    return max((f.parent for f in usable), key=lambda f: f.stat().st_mtime, default=None)


def python_command(folder: Path, architecture: str, cpu: str) -> list[str]:
    """Return the command that starts a sysroot's Python, in QEMU, on a processor."""
    qemu, python = f"{folder}/usr/bin/qemu-{architecture}", f"{folder}/usr/bin/python3"
    return [qemu, "-cpu", cpu, "-L", str(folder), python, "-IS"]


def prepare(
    architecture: str, cpu: str, qemu: Path | None, announce: Callable[[str], None]
) -> None:
    """Fetch everything by the user's apt and pip, and start it once on a processor.

    `qemu` is a QEMU of the user's, which is copied; else Debian's is fetched. Raise Unavailable
    where apt knows no archive of Debian, StageFailed where a command fails, which keeps nothing.
    """
    with partial_folder(cache_folder() / architecture) as folder:
        debs = _fetch_debian_packages(architecture, qemu is None, folder / "debs")
        files = [*debs, *_fetch_wheels(architecture, debs, folder / "wheels")]
        files += [qemu] if qemu else []
        hashes = {file.name: sha256_of(file) for file in files}
        for file in files:
            size = file.stat().st_size / 2**20
            announce(f"{file.name}, {size:.1f} MiB, sha256 {hashes[file.name]}")
        root = folder / "root"
        _unpack(architecture, files, root)
        fetched = {"onnxruntime": version("onnxruntime"), "files": hashes}
        (root / MANIFEST).write_text(json.dumps(fetched, indent=1))
        # Python also writes its byte code then: importing takes a third of the time afterwards.
        start = f"import sys; sys.path.append({str(root / PACKAGES)!r}); import numpy, onnxruntime"
        _run([*python_command(root, architecture, cpu), "-c", start], env={})
        digest = sha256_of(root / MANIFEST)[:16]
        replace(root, cache_folder() / f"{architecture}-{digest}")


def _fetch_debian_packages(architecture: str, with_qemu: bool, folder: Path) -> list[Path]:
    """Download Python and its libraries for an architecture, and QEMU for this one."""
    host, other = DEBIAN_OF.get(platform.machine(), ""), DEBIAN_OF[architecture]
    listed = _run(["apt-get", "indextargets", "--format", "$(SITE) $(LABEL)"]).splitlines()
    archive = next((line.split()[0] for line in listed if line.endswith(" Debian")), "")
    if not archive:
        raise Unavailable(
            "apt knows no archive of Debian; add one to its sources, with its key, and run "
            "apt-get update"
        )
    (folder / "partial").mkdir(parents=True)
    (folder / "lists").mkdir()
    (folder / "status").touch()  # nothing is installed, so that all dependencies are fetched
    (folder / "sources").write_text(f"deb {archive} {RELEASE} main\n")
    settings = (
        *(f"APT::Architecture={host}", f"APT::Architectures::={other}"),
        *("APT::Install-Recommends=false", "APT::Sandbox::User=", "Acquire::Languages=none"),
        *(f"Dir::Cache={folder}", f"Dir::Cache::archives={folder}", "Debug::NoLocking=true"),
        *(f"Dir::Etc::sourcelist={folder}/sources", "Dir::Etc::sourceparts=-"),
        *(f"Dir::State={folder}", f"Dir::State::status={folder}/status"),
    )
    apt = ["apt-get", "-q", *(x for setting in settings for x in ("-o", setting))]
    wanted = [f"{package}:{other}" for package in DEBS]
    _run([*apt, "update"])
    qemu = [f"qemu-user:{host}"] if with_qemu else []
    _run([*apt, "install", "--yes", "--download-only", *wanted, *qemu])
    # QEMU's own dependencies are installed here, or it does without.
    wanted = [f"*_{other}.deb", "*_all.deb", f"{QEMU}*"]
    return sorted({file for pattern in wanted for file in folder.glob(pattern)})


def _fetch_wheels(architecture: str, debs: Sequence[Path], folder: Path) -> list[Path]:
    """Download onnxruntime and numpy of this environment's versions for Debian's Python."""
    python = next(d.name for d in debs if d.name.startswith("python3-minimal_")).split("_")[1]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    pip += ["--only-binary", ":all:", "--python-version", ".".join(python.split(".")[:2])]
    for minor in range(41, 16, -1):
        pip += ["--platform", f"manylinux_2_{minor}_{architecture}"]
    _run([*pip, *(f"{name}=={version(name)}" for name in WHEELS)])
    return sorted(folder.glob("*.whl"))


def _unpack(architecture: str, files: Sequence[Path], root: Path) -> None:
    # Debian's files lie below /usr alone, and links lead there.
    program = f"usr/bin/qemu-{architecture}"
    (root / "usr").mkdir(parents=True)
    for name in ("lib", "bin", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for file in files:
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as archive:
                archive.extractall(root / PACKAGES)
        elif file.name.startswith(QEMU):  # 60 emulators, of which one is needed
            unpack = ["sh", "-c", 'dpkg-deb --fsys-tarfile "$0" | tar -xC "$1" "./$2"']
            _run([*unpack, str(file), str(root), program])
        elif file.suffix == ".deb":
            _run(["dpkg-deb", "--extract", str(file), str(root)])
        else:
            shutil.copy(file, root / program)


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=env, check=False
        )
    except FileNotFoundError:
        raise Unavailable(
            f"needs {command[0]}, which is not here; Debian and Ubuntu have it"
        ) from None
    except subprocess.TimeoutExpired as error:
        raise StageFailed(str(error)) from error
    if ran.returncode:
        *_, last = "", *ran.stderr.strip().splitlines()
        raise StageFailed(f"{command[0]} {describe_exit_code(ran.returncode)}: {last}")
    return ran.stdout
