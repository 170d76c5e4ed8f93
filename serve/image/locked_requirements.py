"""Pin what serving without torch needs to the installed versions and hashes of their wheels."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distributions
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed, Unavailable
from compress.serve.http.uvicorn_server import refuse_missing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
LONGEST_PIP = 1800
"""Seconds for all packages, of which a runtime may have hundreds of MB."""
SERVING = (
    *("httptools", "lazy_loader", "numpy", "prometheus-client", "pydantic"),
    *("pyyaml", "rich", "typer", "uvicorn", "uvloop"),
)
"""What `compress serve` and `compress verify` import besides the model's runtime; no torch."""


def locked_requirements(folder: Path, runtime: str, readers: Iterable[str] = ()) -> str:
    """Return a requirements file of the installed versions, with a hash each, as pip resolves them.

    pip asks the package index that it is configured for, and installs nothing. The wheels are
    those for this machine's Python and architecture.

    Args:
        folder: for the file with the versions that pip may choose.
        runtime: package that runs the model.
        readers: packages that read texts and images of requests.

    Raises:
        Unavailable: pip or a package that serving needs is not installed.
        StageFailed: pip finds no wheel of an installed version, or cannot reach the index.
    """
    refuse_missing()
    constraints = folder / "constraints.txt"
    # Not of the packages that are asked for: pip would only say that something conflicts.
    serving = (*SERVING, runtime, *readers)
    wanted = {name.replace("_", "-") for name in serving}
    installed = {d.name: d.version for d in distributions() if d.name}
    # Not by a search for the module, of which setuptools warns where distutils was imported.
    if "pip" not in installed:
        raise Unavailable("compress package needs pip to find hashes: python -m ensurepip")
    installed = {n: v for n, v in installed.items() if n.lower().replace("_", "-") not in wanted}
    constraints.write_text(
        "".join(f"{name}=={version}\n" for name, version in sorted(installed.items())),
        encoding="utf-8",
    )
    pinned = [f"{name}=={distribution_version(name)}" for name in serving]
    options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    report = run_pip("install", *options, "--constraint", str(constraints), *pinned)
    constraints.unlink()
    lines = [f"# For Python {sys.version_info[0]}.{sys.version_info[1]}, found by pip."]
    for found in json.loads(report)["install"]:
        name, version = found["metadata"]["name"], found["metadata"]["version"]
        sha256 = found["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name.lower()}=={version} --hash=sha256:{sha256}")
    return "\n".join([lines[0], *sorted(lines[1:])]) + "\n"


def run_pip(*arguments: str) -> str:
    """Run pip and return its standard output; StageFailed with its first error line."""
    try:
        done = subprocess.run(
            [*PIP, *arguments, "--quiet", "--no-input"],
            capture_output=True,
            text=True,
            timeout=LONGEST_PIP,
        )
    except subprocess.TimeoutExpired as error:
        raise StageFailed(
            f"compress package: pip {arguments[0]}: has not ended within {LONGEST_PIP} s; is the "
            "package index that pip is configured for reachable?"
        ) from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise StageFailed(
            f"compress package: pip {arguments[0]}: {(errors or ['ERROR: it failed'])[0][7:]}; "
            "the hashes come from the package index that pip is configured for"
        )
    return done.stdout
