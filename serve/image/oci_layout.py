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
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import new_folder
from compress.common.atomic_files import open_regular, sha256_of, stays_inside
from compress.common.errors import ArtifactInvalid
from serve.image.build_folder import (
    HOME,
    PORT,
    USER,
    VARIABLES,
    ImageFiles,
    entrypoint,
    make_readable,
    write_image_files,
)
from serve.image.locked_requirements import run_pip

if TYPE_CHECKING:
    from pathlib import Path

    from serve.image.build_folder import Attest

MEDIA = "application/vnd.oci.image."
INDEX, MANIFEST_TYPE, CONFIG = (
    f"{MEDIA}{kind}.v1+json" for kind in ("index", "manifest", "config")
)
LAYER = f"{MEDIA}layer.v1.tar+gzip"
READ_LAYERS = (LAYER, f"{MEDIA}layer.v1.tar")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""OCI's names, which are Go's, by Python's."""
Json = dict[str, Any]


def write_image_layout(path: Path, out: Path, base: Path, attest: Attest) -> ImageFiles:
    """Write an OCI layout: the image of `base`, and a layer with server, packages and artifact.

    The same artifact, base, versions and zlib give the same digest.

    Args:
        path: directory of an `onnx` or `openvino` artifact.
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

    Raises:
        ArtifactInvalid: it is no layout, holds no such image or several, or not this Python.
    """
    if read_json(base / "oci-layout").get("imageLayoutVersion") != "1.0.0":
        raise ArtifactInvalid(f"{base}: oci-layout: expected imageLayoutVersion 1.0.0")
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    wanted = ("linux", architecture)
    descriptors = [*read_json(base / "index.json")["manifests"]]
    images = []
    for descriptor in descriptors:
        content = read_json(blob(base, descriptor))
        if descriptor["mediaType"] == INDEX:
            descriptors += content["manifests"]  # images for several platforms
            continue
        if descriptor["mediaType"] != MANIFEST_TYPE or content["config"]["mediaType"] != CONFIG:
            continue  # an attestation, or Docker's own format
        config = read_json(blob(base, content["config"]))
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
    found = False
    for descriptor in manifest["layers"]:
        with tarfile.open(blob(base, descriptor)) as archive:
            found |= any(member.name.endswith(f"bin/{name}") for member in archive)
    if not found:
        raise ArtifactInvalid(
            f"{base}: has no {name} in a folder bin, which the installed packages are for"
        )


def blob(base: Path, descriptor: Json) -> Path:
    """Return a descriptor's file, after its hash was checked; else raise ArtifactInvalid."""
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    path = base / "blobs" / algorithm / digest
    if algorithm != "sha256" or not stays_inside(digest):
        raise ArtifactInvalid(f"{base}: digest {descriptor['digest']!r}, expected sha256:…")
    try:
        found = sha256_of(path)
    except OSError as error:
        raise ArtifactInvalid(f"{path}: {error.strerror}") from error
    if found != digest:
        raise ArtifactInvalid(f"{path}: has sha256 {found}")
    return path


def read_json(path: Path) -> Json:
    """Return the object in a JSON file of a layout; ArtifactInvalid if there is none."""
    try:
        with open_regular(path) as stream:
            content = json.load(stream)
    except (OSError, ValueError) as error:
        raise ArtifactInvalid(f"{path}: no file of an OCI image layout ({error})") from error
    if not isinstance(content, dict):
        raise ArtifactInvalid(f"{path}: expected a JSON object")
    return content


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
