"""Hardware and library versions of this machine, for `lock.json` and cache keys."""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import compress
from compress.artifacts.model_source import installed_version
from compress.export.exporter import EXPORTERS

LIBRARIES = (
    *("torch", "torchao", "onnx", "onnxscript"),
    *filter(None, (exporter.runtime.torch_free_package for exporter in EXPORTERS.values())),
    *("executorch", "numpy", "torchserve"),
)


@cache
def machine() -> dict[str, str | int | None]:
    """Return the hardware that latencies depend on."""
    processor = platform.processor()  # on Linux often empty, or the architecture alone
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return {"platform": platform.machine(), "processor": processor, "cores": os.cpu_count()}


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, this toolkit and the libraries that shape an artifact."""
    # A hash of our own sources, too: a change of them invalidates the cache.
    digest = hashlib.sha256()
    package = Path(compress.__file__).parent
    for root in (package, package / "export", package / "serve"):
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root).as_posix()
            # In a clone these are links, which `rglob` does not follow.
            if not name.startswith(("export/", "serve/", "pipelines/", "cli.py")):
                digest.update(name.encode() + file.read_bytes())
    own = f"{compress.__version__}+{digest.hexdigest()[:12]}"
    found = {"python": platform.python_version(), "compress": own}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def version_of(module_name: str) -> str | None:
    """Return the version of the installed package that a module belongs to; None for our own."""
    return None if module_name.split(".")[0] == "compress" else installed_version(module_name)
