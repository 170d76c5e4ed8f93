"""Write images that serve an artifact: a folder for `docker build`, or an OCI layout (v1)."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import distribution, distributions
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from compress.artifacts.artifact import MANIFEST, Artifact, new_folder
from compress.common.atomic_files import read_regular, sha256_of
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable, raised_as
from compress.common.foreign.child_process import read_in_child
from compress.common.requirements import DISTRIBUTION
from compress.common.sealed_json import canonical_json, write_sealed
from compress.export.exporter import EXPORTERS
from compress.profiling.batch_dependence import seeded_rows
from compress.serve.http.loaded_model import RUNTIMES, open_model
from compress.serve.http.uvicorn_server import TOKEN_VARIABLE, refuse_missing, token_from
from compress.serve.packaging.model_interface import PROBE_SIZES, REPORT
from compress.serve.worker.wire import to_npz

if TYPE_CHECKING:
    Attest = Callable[[Path], object]

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
LONGEST_PIP = 1800  # seconds for all packages, of which a runtime may have hundreds of MB
SERVING = (
    *("httptools", "lazy_loader", "numpy", "prometheus-client", "pydantic"),
    *("pyyaml", "rich", "typer", "uvicorn", "uvloop"),
)
"""What `compress serve` and `compress verify` import besides the model's runtime; no torch."""
logger = logging.getLogger(__name__)
HOME = "/opt/compress"  # folder of the model and the server in an image
USER = "10001:10001"  # no name: Kubernetes' `runAsNonRoot` accepts numbers alone
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
PACKAGE = Path(__file__).parents[2]  # folder of this toolkit, in a checkout or in site-packages
MEDIA = "application/vnd.oci.image."
INDEX, MANIFEST_TYPE, CONFIG = (
    f"{MEDIA}{kind}.v1+json" for kind in ("index", "manifest", "config")
)
LAYER = f"{MEDIA}layer.v1.tar+gzip"
READ_LAYERS = (LAYER, f"{MEDIA}layer.v1.tar")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}  # OCI's names, which are Go's, by Python's
LARGEST_JSON = 2**22  # bytes of a manifest that registries must accept
MOST_UNPACKED, MOST_RATIO = 2**30, 50
"""Bytes that a layer may unpack to, and more for each byte that it has: gzip makes a thousandth of
zeros, and a tenth of texts."""
Json = Any
T = TypeVar("T")


def locked_requirements(folder: Path, runtime: str, readers: Iterable[str] = ()) -> str:
    """Return a requirements file of the installed versions, with a hash each, as pip resolves them.

    The hashes come from the package index that pip is configured for; nothing is installed. The
    wheels are those for this machine's Python and architecture. `runtime` is the package that runs
    the model, `readers` those that read texts and images of requests.
    """
    refuse_missing()
    constraints = folder / "constraints.txt"
    serving = (*SERVING, runtime, *readers)
    wanted = {name.replace("_", "-") for name in serving}
    installed = {d.name: d.version for d in distributions() if d.name}
    # Not by a search for the module, of which setuptools warns where distutils was imported.
    if "pip" not in installed:
        raise Unavailable("compress package needs pip to find hashes: python -m ensurepip")
    lines = [
        f"{name}=={version}\n"
        for name, version in sorted(installed.items())
        # Not the packages that are asked for: pip would only say that something conflicts.
        if name.lower().replace("_", "-") not in wanted
    ]
    constraints.write_text("".join(lines), encoding="utf-8")
    pinned = [f"{name}=={distribution_version(name)}" for name in serving]
    options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    report = run_pip("install", *options, "--constraint", str(constraints), *pinned)
    constraints.unlink()
    lines = [f"# For Python {sys.version_info[0]}.{sys.version_info[1]}, found by pip."]
    for found in json.loads(report)["install"]:
        name, version = found["metadata"]["name"], found["metadata"]["version"]
        archive = found["download_info"]["archive_info"]
        # pip before 23.1, as of Debian 12, has "hash" alone.
        sha256 = archive["hashes"]["sha256"] if "hashes" in archive else archive["hash"][7:]
        lines.append(f"{name.lower()}=={version} --hash=sha256:{sha256}")
    return "\n".join([lines[0], *sorted(lines[1:])]) + "\n"


def run_pip(*arguments: str) -> str:
    """Run pip and return its standard output; StageFailed with its first error line."""
    try:
        done = subprocess.run(
            [*PIP, *arguments], capture_output=True, text=True, timeout=LONGEST_PIP
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
    image_digest: str = ""
    """Digest of an OCI image's manifest; empty for a folder with a Dockerfile."""

    def lines(self) -> tuple[str, ...]:
        """Return the lines for the terminal; their token is the environment's, or a new one."""
        size = f"{self.bytes / 2**20:.1f} MiB"
        is_set = TOKEN_VARIABLE in os.environ
        variable = TOKEN_VARIABLE if is_set else f"{TOKEN_VARIABLE}={token_from(None)[0]}"
        run = f"run --rm --read-only -p 127.0.0.1:{PORT}:{PORT} -e {variable}"
        if self.image_digest:
            what = f"{self.path}: OCI image layout, {size}, image {self.image_digest}"
            return what, f"podman {run} oci:{self.path}"
        return (
            f"{self.path}: Dockerfile and what it copies, {size}",
            f"docker build -t model {self.path}",
            f"docker {run} model",
        )


def write_build_folder(path: Path, out: Path, attest: Attest) -> ImageFiles:
    """Write a Dockerfile, pinned requirements, the artifact, its probe and its attestation.

    `path` is the artifact's directory, of a kind that a runtime other than torch runs; `attest`
    writes an attestation of it to a file.
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
            entrypoint=json.dumps(_entrypoint(partial, artifact)),
        )
        (partial / "Dockerfile").write_text(content, encoding="utf-8")
        (partial / ".dockerignore").write_text(DOCKERIGNORE, encoding="utf-8")
        size = _make_readable(partial)
    return ImageFiles(str(out), artifact.digest, size)


def write_image_files(path: Path, folder: Path, attest: Attest) -> Artifact:
    """Write what both forms of an image hold; return the artifact."""
    artifact = Artifact.from_directory(path)
    if artifact.kind not in RUNTIMES:
        stages = [str(EXPORTERS[kind].model_fields["stage"].default) for kind in RUNTIMES]
        raise ArtifactInvalid(
            f"{path}: is {artifact.kind!r}, expected {' or '.join(map(repr, RUNTIMES))}: images "
            f"hold no torch; export the model with {' or '.join(stages)}"
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
    artifact.copy_files((MANIFEST, *artifact.manifest.files), folder / "model")
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
    libraries = {"image": ["pillow"], "text": ["tokenizers"], "audio": ["soundfile", "soxr"]}
    readers = [library for form in model.forms for library in libraries[form]]
    readers += ["transformers"] if model.forms.get("audio", {}).get("extractor") else []
    requirements = locked_requirements(folder, RUNTIMES[artifact.kind], readers)
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    return artifact


def _entrypoint(folder: Path, artifact: Artifact) -> list[str]:
    """Return the command of an image, which refuses another model than this artifact."""
    command = f"python3 -m compress.cli serve {HOME}/model --host 0.0.0.0".split()
    command += ["--sha256", artifact.digest]
    return [*command, "--report", f"{HOME}/{REPORT}"] if (folder / REPORT).is_file() else command


def _make_readable(folder: Path) -> int:
    """Let every user read a folder, as an image's user must; return its size in bytes."""
    size = 0
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        size += 0 if path.is_dir() else path.stat().st_size
    return size


class _Object(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]  # pydantic's


class _LayoutFile(_Object):
    imageLayoutVersion: Literal["1.0.0"]


class _Descriptor(_Object):
    mediaType: str
    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]


class _Index(_Object):
    manifests: list[_Descriptor]


class _Manifest(_Object):
    config: _Descriptor
    layers: list[_Descriptor]


class _Started(_Object):
    Env: NotRequired[list[Annotated[str, Field(pattern="=")]] | None]
    Labels: NotRequired[dict[str, str] | None]


class _RootFS(_Object):
    diff_ids: list[str]


class _Config(_Object):
    os: str
    architecture: str
    rootfs: _RootFS
    config: NotRequired[_Started | None]
    history: NotRequired[list[Json]]


def write_image_layout(path: Path, out: Path, base: Path, attest: Attest) -> ImageFiles:
    """Write an OCI layout: the image of `base`, and a layer with server, packages and artifact.

    The same artifact, base, versions and zlib give the same digest. `base` is a layout of one image
    with this Python, as `skopeo copy docker://… oci:DIR` writes it; ArtifactInvalid for another.
    The rest is as in `write_build_folder`.
    """
    manifest, config = read_base(base)
    with new_folder(out) as partial:
        root = partial / "root"
        root.mkdir()
        artifact = write_image_files(path, root, attest)
        options = ["--no-deps", "--require-hashes", "--no-compile", "--target", str(root / "lib")]
        run_pip("install", *options, "--requirement", str(root / "requirements.txt"))
        # Their first lines name this machine's Python.
        shutil.rmtree(root / "lib" / "bin", ignore_errors=True)
        for record in (root / "lib").glob("*.dist-info/RECORD"):
            lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
            record.write_text("".join(line for line in lines if not line.startswith("../")))
        _make_readable(root)
        command = _entrypoint(root, artifact)
        blobs = partial / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layer, diff_id = write_layer(root, blobs)
        shutil.rmtree(root)
        for descriptor in manifest["layers"]:
            shutil.copyfile(_blob(base, descriptor), blobs / descriptor["digest"][7:])
        settings: Json = config.setdefault("config", {}) or {}
        environment = dict(entry.split("=", 1) for entry in settings.get("Env") or ())
        label = {"compress.artifact.digest": artifact.digest}
        settings |= {
            "User": USER,
            "Env": [f"{name}={value}" for name, value in (environment | VARIABLES).items()],
            "Entrypoint": command,
            "ExposedPorts": {f"{PORT}/tcp": {}},
            "Labels": (settings.get("Labels") or {}) | label,
        }
        settings.pop("Cmd", None)  # the base's would be options of the server
        config["config"] = settings
        config["rootfs"]["diff_ids"].append(diff_id)
        config.setdefault("history", []).append({"created_by": f"compress package {artifact.kind}"})
        image = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _write_blob(blobs, config, CONFIG),
            "layers": [*manifest["layers"], layer],
        }
        descriptor = _write_blob(blobs, image, MANIFEST_TYPE)
        reference = {"org.opencontainers.image.ref.name": "latest"}
        manifests = [descriptor | {"annotations": reference}]
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
        (partial / "index.json").write_text(canonical_json(index))
        (partial / "oci-layout").write_text(canonical_json({"imageLayoutVersion": "1.0.0"}))
        size = _make_readable(partial)
    return ImageFiles(str(out), artifact.digest, size, descriptor["digest"])


def read_base(base: Path) -> tuple[Json, Json]:
    """Read a layout's manifest and configuration in a child, within limits that its blobs give."""
    return read_in_child(str(base), lambda: _read_base(base), base / "blobs" / "sha256")


def _read_base(base: Path) -> tuple[Json, Json]:
    _read_json(base / "oci-layout", TypeAdapter(_LayoutFile))
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    wanted = ("linux", architecture)
    descriptors, seen = [*_read_json(base / "index.json", TypeAdapter(_Index))["manifests"]], set()
    images = []
    for descriptor in descriptors:
        if descriptor["digest"] in seen:
            continue
        seen.add(descriptor["digest"])
        if descriptor["mediaType"] == INDEX:  # images for several platforms
            descriptors += _read_json(_blob(base, descriptor), TypeAdapter(_Index))["manifests"]
        elif descriptor["mediaType"] == MANIFEST_TYPE:
            content = _read_json(_blob(base, descriptor), TypeAdapter(_Manifest))
            if content["config"]["mediaType"] != CONFIG:
                continue  # an attestation; other types are Docker's own format
            config = _read_json(_blob(base, content["config"]), TypeAdapter(_Config))
            if (config["os"], config["architecture"]) == wanted:
                images.append((content, config))
    if len(images) != 1:
        raise ArtifactInvalid(
            f"{base}: holds {len(images)} OCI images for {'/'.join(wanted)}, expected one"
        )
    # The packages' compiled code is for one version. A file that a later layer deletes counts too.
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    layers = images[0][0]["layers"]
    for descriptor in layers:
        if descriptor["mediaType"] not in READ_LAYERS:
            raise ArtifactInvalid(
                f"{base}: a layer is {descriptor['mediaType']}, expected {' or '.join(READ_LAYERS)}"
            )
    if not any(_holds(_blob(base, descriptor), f"bin/{name}") for descriptor in layers):
        raise ArtifactInvalid(
            f"{base}: has no {name} in a folder bin, which the installed packages are for"
        )
    return images[0]


def _holds(layer: Path, name: str) -> bool:
    most = MOST_UNPACKED + MOST_RATIO * layer.stat().st_size
    what = f"{layer}: not a readable layer"
    with raised_as(ArtifactInvalid, what), tarfile.open(layer, "r|*") as archive:
        for member in archive:  # its data are read only to find the next one
            if member.name.endswith(name):
                return True
            if member.offset_data + member.size > most:
                raise ArtifactInvalid(f"{layer}: unpacks to more than {most} bytes")
            archive.members.clear()  # type: ignore[attr-defined]  # or it would keep all
    return False


def _blob(base: Path, descriptor: Json) -> Path:
    """Return a descriptor's file, after its hash was checked; else raise ArtifactInvalid."""
    digest: str = descriptor["digest"].removeprefix("sha256:")
    path: Path = base / "blobs" / "sha256" / digest
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ArtifactInvalid(f"{path}: {error.strerror}") from error
    if found != digest:
        raise ArtifactInvalid(f"{path}: has sha256 {found}")
    return path


def _read_json(path: Path, content: TypeAdapter[T]) -> T:
    try:
        return content.validate_json(read_regular(path, LARGEST_JSON))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ArtifactInvalid(
            f"{path}: no file of an OCI image layout ({place}: {problem['msg']})"
        ) from error
    except OSError as error:
        raise ArtifactInvalid(f"{path}: no file of an OCI image layout ({error})") from error


def write_layer(root: Path, blobs: Path) -> tuple[Json, str]:
    """Write a folder as a layer's tar file; return its descriptor and the hash of the plain tar."""
    plain = blobs.parent / "layer.tar"
    packed = blobs.parent / "layer.tar.gz"
    parents = [HOME[1:].rsplit("/", depth)[0] for depth in range(HOME.count("/") - 1, 0, -1)]
    paths = dict.fromkeys(parents, root)
    for path in (root, *sorted(root.rglob("*"))):
        paths[f"{HOME[1:]}/{path.relative_to(root).as_posix()}".removesuffix("/.")] = path
    with tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in paths.items():
            entry = tarfile.TarInfo(name)  # of user 0 and time 0
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(entry)
            else:
                entry.size, entry.mode = path.stat().st_size, 0o644
                with path.open("rb") as stream:
                    archive.addfile(entry, stream)
    diff_id = f"sha256:{sha256_of(plain)}"
    with (
        plain.open("rb") as stream,
        packed.open("wb") as target,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=target, mtime=0) as compressed,
    ):
        shutil.copyfileobj(stream, compressed)
    plain.unlink()
    digest, size = sha256_of(packed), packed.stat().st_size
    packed.replace(blobs / digest)
    return {"mediaType": LAYER, "digest": f"sha256:{digest}", "size": size}, diff_id


def _write_blob(blobs: Path, content: Json, media_type: str) -> Json:
    raw = canonical_json(content).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(raw)}
