"""Write the folder from which `docker build` makes an image that serves an artifact.

What serving without torch needs is pinned to the installed versions and hashes of their wheels.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import distribution, distributions
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import MANIFEST, Artifact, new_folder
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable
from compress.common.requirements import DISTRIBUTION
from compress.common.sealed_json import write_sealed
from compress.export.exporter import EXPORTERS
from compress.profiling.probe_rows import seeded_rows
from compress.serve.http.loaded_model import RUNTIMES, open_model
from compress.serve.http.uvicorn_server import refuse_missing
from compress.serve.packaging.model_interface import PROBE_SIZES
from compress.serve.packaging.recorded_measurements import REPORT
from compress.serve.worker.wire import to_npz

if TYPE_CHECKING:
    from collections.abc import Callable

    Attest = Callable[[Path], object]
    from collections.abc import Iterable

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
LONGEST_PIP = 1800
"""Seconds for all packages, of which a runtime may have hundreds of MB."""
SERVING = (
    *("httptools", "lazy_loader", "numpy", "prometheus-client", "pydantic"),
    *("pyyaml", "rich", "typer", "uvicorn", "uvloop"),
)
"""What `compress serve` and `compress verify` import besides the model's runtime; no torch."""
logger = logging.getLogger(__name__)
HOME = "/opt/compress"
"""Folder of the model and the server in an image."""
USER = "10001:10001"
"""Without a name in /etc/passwd; Kubernetes' `runAsNonRoot` accepts numbers alone."""
PORT = 8080
VARIABLES = {
    "PYTHONPATH": f"{HOME}/app:{HOME}/lib",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",  # the root file system may be read-only
}
HEALTH = (
    "import urllib.request as r; "
    f"r.urlopen('http://127.0.0.1:{PORT}/v2/health/ready', timeout=4).close()"
)

DOCKERFILE = """\
ARG PYTHON_IMAGE=python:{python}-slim
FROM ${{PYTHON_IMAGE}}
COPY requirements.txt {home}/
RUN pip install --no-cache-dir --no-deps --require-hashes -r {home}/requirements.txt
COPY app {home}/app
RUN python3 -m compileall -q {home}/app
COPY model {home}/model
COPY {files} {home}/
ENV {variables}
LABEL compress.artifact.digest="{digest}"
USER {user}
EXPOSE {port}
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s CMD {health}
ENTRYPOINT {entrypoint}
"""
DOCKERIGNORE = "*\n!app\n!model\n!*.json\n!*.npz\n!requirements.txt\n"
PACKAGE = Path(__file__).parents[2]
"""Folder of this toolkit, in a checkout or in site-packages."""


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


@dataclass(frozen=True)
class ImageFiles:
    """A written folder, for the terminal."""

    path: str
    digest: str
    """Of the artifact."""
    bytes: int
    """Size of all files."""
    image_digest: str = ""
    """Digest of an OCI image's manifest; empty for a folder with a Dockerfile."""

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the terminal."""
        size = f"{self.bytes / 2**20:.1f} MiB"
        if self.image_digest:
            return (f"{self.path}: OCI image layout, {size}, image {self.image_digest}",)
        return (
            f"{self.path}: Dockerfile and what it copies, {size}",
            f"docker build -t model {self.path}",
            f"docker run --rm --read-only -p 127.0.0.1:{PORT}:{PORT} model",
        )


def write_build_folder(path: Path, out: Path, attest: Attest) -> ImageFiles:
    """Write a Dockerfile, pinned requirements, the artifact, its probe and its attestation.

    Args:
        path: directory of an artifact that a runtime other than torch runs.
        out: the folder to write, which must not exist or be empty.
        attest: writes an attestation of the artifact to a file.

    Raises:
        ArtifactInvalid: the artifact is of another kind, or not what was sealed.
        PipelineInvalid: `out` holds files.
        StageFailed: the model does not answer its own signature, or pip finds no hashes.
    """
    with new_folder(out) as partial:
        artifact = write_image_files(path, partial, attest)
        files = sorted(f.name for f in partial.iterdir() if f.suffix in (".json", ".npz"))
        content = DOCKERFILE.format(
            python=f"{sys.version_info[0]}.{sys.version_info[1]}",
            home=HOME,
            files=" ".join(files),
            variables=" ".join(f"{name}={value}" for name, value in VARIABLES.items()),
            digest=artifact.digest,
            user=USER,
            port=PORT,
            health=json.dumps(["python3", "-c", HEALTH]),
            entrypoint=json.dumps(entrypoint(partial, artifact)),
        )
        (partial / "Dockerfile").write_text(content, encoding="utf-8")
        (partial / ".dockerignore").write_text(DOCKERIGNORE, encoding="utf-8")
        size = make_readable(partial)
    return ImageFiles(str(out), artifact.digest, size)


def write_image_files(path: Path, folder: Path, attest: Attest) -> Artifact:
    """Write what both forms of an image hold; return the artifact."""
    artifact = Artifact.from_directory(path)
    if artifact.kind not in RUNTIMES:
        raise ArtifactInvalid(
            f"{path}: is {artifact.kind!r}, expected {' or '.join(map(repr, RUNTIMES))}: images "
            f"hold no torch; export the model with {' or '.join(map(_exporter, RUNTIMES))}"
        )
    inputs = seeded_rows(artifact.signature, PROBE_SIZES[0])
    with open_model(artifact, "model", threads=1) as model:  # it checks every digest
        outputs = model.call(*inputs)
    names = [spec.name for spec in artifact.signature.inputs]
    names += [output.name for output in artifact.signature.outputs]
    probe = dict(zip(names, (*inputs, *outputs), strict=True))
    (folder / "probe.npz").write_bytes(to_npz(probe))
    attest(folder / "attestation.json")
    if model.recorded.batch_dependence:
        # Of the run's report, only what the server needs: the rest is not served.
        measured = model.recorded.model_dump(mode="json")
        stage = {"artifact": {"digest": artifact.digest}, "measurements": measured}
        write_sealed(folder / REPORT, {"stages": [stage]})
    for name in (MANIFEST, *artifact.manifest.files):
        target = folder / "model" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact.path / name, target)
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "app" / PACKAGE.name, ignore=skip)
    # With its entry points, by which the server finds the artifact's kind.
    installed = distribution(DISTRIBUTION)
    metadata = folder / "app" / f"{DISTRIBUTION.replace('-', '_')}-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (metadata / name).write_text(str(installed.read_text(name)), encoding="utf-8")
    _, notes = model.recorded.served_forms(artifact)
    for note in notes:
        logger.error("note: %s", note)  # the command shows errors only
    # What `compress serve` answers here, with the libraries of this machine, the image answers.
    libraries = {"image": "pillow", "text": "tokenizers"}
    readers = [libraries[form] for form in model.forms]
    requirements = locked_requirements(folder, RUNTIMES[artifact.kind], readers)
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    return artifact


def _exporter(kind: str) -> str:
    return str(EXPORTERS[kind].model_fields["stage"].default)


def entrypoint(folder: Path, artifact: Artifact) -> list[str]:
    """Return the command of an image, which refuses another model than this artifact."""
    command: list[Any] = [
        "python3",
        "-m",
        "compress.cli",
        "serve",
        f"{HOME}/model",
        "--host",
        "0.0.0.0",
    ]
    command += ["--sha256", artifact.digest]
    return [*command, "--report", f"{HOME}/{REPORT}"] if (folder / REPORT).is_file() else command


def make_readable(folder: Path) -> int:
    """Let every user read a folder, as an image's user must; return its size in bytes."""
    size = 0
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        size += 0 if path.is_dir() else path.stat().st_size
    return size
