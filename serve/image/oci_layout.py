"""Add a layer that serves an ONNX artifact to the image of an OCI layout, without Docker.

Format: OCI image specification v1 (image layout, index, manifest, configuration and layer).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import shutil
import sys
import tarfile
import zlib
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from compress.artifacts.artifact import new_folder
from compress.common.atomic_files import open_regular, sha256_of
from compress.common.errors import ArtifactInvalid, first_line
from compress.common.foreign.child_process import read_in_child
from compress.serve.image.build_folder import (
    HOME,
    PORT,
    USER,
    VARIABLES,
    ImageFiles,
    entrypoint,
    make_readable,
    run_pip,
    write_image_files,
)

if TYPE_CHECKING:
    from pathlib import Path

    from compress.serve.image.build_folder import Attest

MEDIA = "application/vnd.oci.image."
INDEX, MANIFEST_TYPE, CONFIG = (
    f"{MEDIA}{kind}.v1+json" for kind in ("index", "manifest", "config")
)

LAYER = f"{MEDIA}layer.v1.tar+gzip"
READ_LAYERS = (LAYER, f"{MEDIA}layer.v1.tar")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""OCI's names, which are Go's, by Python's."""
LARGEST_JSON = 2**22
"""Bytes of a manifest that registries must accept."""
Json = Any
T = TypeVar("T")


class _Object(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]  # pydantic's


class LayoutFile(_Object):
    """Content of `oci-layout`."""

    imageLayoutVersion: Literal["1.0.0"]


class Descriptor(_Object):
    """Names a blob."""

    mediaType: str
    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]


class Index(_Object):
    """Names images, or further indexes."""

    manifests: list[Descriptor]


class Manifest(_Object):
    """Names the configuration and the layers of an image."""

    config: Descriptor
    layers: list[Descriptor]


class Started(_Object):
    """How a container is started."""

    Env: NotRequired[list[Annotated[str, Field(pattern="=")]] | None]
    Labels: NotRequired[dict[str, str] | None]


class RootFS(_Object):
    """The hashes of the layers, unpacked."""

    diff_ids: list[str]


class Config(_Object):
    """Configuration of an image."""

    os: str
    architecture: str
    rootfs: RootFS
    config: NotRequired[Started | None]
    history: NotRequired[list[Json]]


def write_image_layout(path: Path, out: Path, base: Path, attest: Attest) -> ImageFiles:
    """Write an OCI layout: the image of `base`, and a layer with server, packages and artifact.

    The same artifact, base, versions and zlib give the same digest.

    Args:
        path: directory of an artifact that a runtime other than torch runs.
        out: the layout to write, which must not exist or be empty.
        base: a layout of one image with this Python, as `skopeo copy docker://… oci:DIR` writes it.
        attest: writes an attestation of the artifact to a file.

    Raises:
        ArtifactInvalid: the artifact or the base is not as expected.
        PipelineInvalid: `out` holds files.
        StageFailed: the model does not answer its own signature, or pip finds no package.
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
        make_readable(root)
        command = entrypoint(root, artifact)
        blobs = partial / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layer, diff_id = write_layer(root, blobs)
        shutil.rmtree(root)
        for descriptor in manifest["layers"]:
            shutil.copyfile(blob(base, descriptor), blobs / descriptor["digest"][7:])
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
            "config": write_blob(blobs, config, CONFIG),
            "layers": [*manifest["layers"], layer],
        }
        descriptor = write_blob(blobs, image, MANIFEST_TYPE)
        reference = {"org.opencontainers.image.ref.name": "latest"}
        index = {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [descriptor | {"annotations": reference}],
        }
        (partial / "index.json").write_bytes(as_bytes(index))
        (partial / "oci-layout").write_bytes(as_bytes({"imageLayoutVersion": "1.0.0"}))
        size = make_readable(partial)
    return ImageFiles(str(out), artifact.digest, size, descriptor["digest"])


def read_base(base: Path) -> tuple[Json, Json]:
    """Return the manifest and the configuration of a layout's image for this machine.

    A child process reads it, within limits of memory and time that the size of its blobs gives.

    Raises:
        ArtifactInvalid: it is no layout, holds no such image or several, or not this Python.
    """
    return read_in_child(str(base), lambda: _read_base(base), base / "blobs" / "sha256")


def _read_base(base: Path) -> tuple[Json, Json]:
    read_json(base / "oci-layout", TypeAdapter(LayoutFile))
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    wanted = ("linux", architecture)
    descriptors, seen = [*read_json(base / "index.json", TypeAdapter(Index))["manifests"]], set()
    images = []
    for descriptor in descriptors:
        if descriptor["digest"] in seen:
            continue
        seen.add(descriptor["digest"])
        if descriptor["mediaType"] == INDEX:  # images for several platforms
            descriptors += read_json(blob(base, descriptor), TypeAdapter(Index))["manifests"]
        elif descriptor["mediaType"] == MANIFEST_TYPE:
            content = read_json(blob(base, descriptor), TypeAdapter(Manifest))
            if content["config"]["mediaType"] != CONFIG:
                continue  # an attestation; other types are Docker's own format
            config = read_json(blob(base, content["config"]), TypeAdapter(Config))
            if (config["os"], config["architecture"]) == wanted:
                images.append((content, config))
    if len(images) != 1:
        raise ArtifactInvalid(
            f"{base}: holds {len(images)} OCI images for {'/'.join(wanted)}, expected one"
        )
    refuse_other_python(base, images[0][0])
    return images[0]


def refuse_other_python(base: Path, manifest: Json) -> None:
    """Raise ArtifactInvalid if no layer holds this process's version of Python."""
    # The packages' compiled code is for one version. A file that a later layer deletes counts too.
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for descriptor in manifest["layers"]:
        if descriptor["mediaType"] not in READ_LAYERS:
            raise ArtifactInvalid(
                f"{base}: a layer is {descriptor['mediaType']}, expected {' or '.join(READ_LAYERS)}"
            )
    if not any(_holds(blob(base, descriptor), f"bin/{name}") for descriptor in manifest["layers"]):
        raise ArtifactInvalid(
            f"{base}: has no {name} in a folder bin, which the installed packages are for"
        )


def _holds(layer: Path, name: str) -> bool:
    try:
        with tarfile.open(layer, "r|*") as archive:
            for member in archive:
                if member.name.endswith(name):
                    return True
                archive.members.clear()  # type: ignore[attr-defined]  # or it would keep all
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ArtifactInvalid(f"{layer}: not a readable layer ({first_line(error)})") from error
    return False


def blob(base: Path, descriptor: Json) -> Path:
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


def read_json(path: Path, content: TypeAdapter[T]) -> T:
    """Return the object in a JSON file of a layout; ArtifactInvalid if it is another."""
    try:
        with open_regular(path) as stream:
            raw = stream.read(LARGEST_JSON + 1)
        if len(raw) > LARGEST_JSON:
            raise ArtifactInvalid(f"{path}: has more than {LARGEST_JSON} bytes")
        return content.validate_json(raw)
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
    with tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in parents:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for path in (root, *sorted(root.rglob("*"))):
            name = f"{HOME[1:]}/{path.relative_to(root).as_posix()}".removesuffix("/.")
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
    digest = sha256_of(packed)
    descriptor = {
        "mediaType": LAYER,
        "digest": f"sha256:{digest}",
        "size": packed.stat().st_size,
    }
    packed.replace(blobs / digest)
    return descriptor, diff_id


def write_blob(blobs: Path, content: Json, media_type: str) -> Json:
    """Write JSON under its hash; return its descriptor."""
    raw = as_bytes(content)
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(raw)}


def as_bytes(content: Json) -> bytes:
    """Return JSON with sorted keys, the same bytes for the same content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
