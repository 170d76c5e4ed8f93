"""Opens a ``.mar`` of this toolkit for the built-in server, without running its code."""

from __future__ import annotations

import zipfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable, raised_as
from compress.export.imported.exported_files import refuse_wrong_artifact_hash
from compress.serve.http.loaded_model import WARM_CALLS, ServedModel
from compress.serve.packaging.model_interface import infer_interface
from compress.serve.packaging.provenance import PROVENANCE, Provenance
from compress.serve.packaging.request_forms import FORMS
from compress.serve.torchserve.artifact import PROBE, TorchServeArchive, check_bare_mar
from compress.serve.torchserve.mar_file import (
    CONFIG,
    HANDLER,
    handler_text,
    model_name_of,
    unpacked,
)
from compress.serve.worker.loaders import LOADERS, replay
from compress.serve.worker.wire import from_npz

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

NOT_SHOWN = (
    "the run that packed it did not show that the rows of a batch do not influence each other"
)


def is_archive(path: Path) -> bool:
    """Return whether a path is a ``.mar``, or the directory of a `torchserve` artifact.

    ArtifactInvalid for a ``.mar`` that others wrote.
    """
    if path.suffix == ".mar" and path.is_file():
        names = [PROVENANCE]
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            names = archive.namelist()  # of another file, `check_archive` says what is wrong
        if PROVENANCE not in names:
            raise ArtifactInvalid(
                f"{path}: has no {PROVENANCE}, so package_torchserve did not write it: its handler "
                "is code of others, which is not run here; serve it with TorchServe itself"
            )
        return True
    if not (path / MANIFEST).is_file():
        return False
    return isinstance(Artifact.read_manifest(path), TorchServeArchive)


def check_archive(path: Path, sha256: str | None) -> tuple[Path, dict[str, bytes], Provenance]:
    """Return the ``.mar`` of a path that :func:`is_archive` found, its members and provenance.

    Its handler may be another version's: it is not run. ArtifactInvalid where a member is not the
    one that was packed, it has another SHA-256, or none was given for native code of a bare file.
    """
    if path.is_dir() or (path.parent / MANIFEST).is_file():
        archive = TorchServeArchive.from_directory(path if path.is_dir() else path.parent)
        refuse_wrong_artifact_hash(archive, sha256)
        if path not in (archive.path, archive.payload_path):
            raise ArtifactInvalid(f"{path}: expected the directory, or its {archive.payload_name}")
        return archive.payload_path, *archive.check(runs_handler=False)
    members, origin = check_bare_mar(path, sha256, runs_handler=False)
    if origin.artifact.kind == "aot" and sha256 is None:
        raise ArtifactInvalid(
            f"{path}: its model is native code, which cannot be inspected: give the archive's "
            "sha256, from a source that you trust, with --sha256"
        )
    return path, members, origin


def default_name(path: Path) -> str:
    """Return the name under which a path is served that is given without one."""
    if not is_archive(path):
        return "model"
    return model_name_of(path / TorchServeArchive.payload if path.is_dir() else path)


def handler_settings(members: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the settings of an archive's handler."""
    settings: dict[str, Any] = yaml.safe_load(members[CONFIG])["handler"]
    return settings


@contextmanager
def load_archive(
    mar: Path,
    members: Mapping[str, bytes],
    origin: Provenance,
    name: str,
    threads: int | None = None,
) -> Iterator[ServedModel]:
    """Load the model of a checked archive, and replay its probe.

    Bodies are read as its handler reads them, by its own settings. `threads` are by default those
    that it records. StageFailed where the model does not answer the probe as packaged; Unavailable
    where a library that reads texts, images or sounds is missing.
    """
    settings = handler_settings(members)
    forms = {name: settings[name] for name in FORMS if settings.get(name)}
    missing = [r for name in forms for r in FORMS[name].requirements if r.missing()]
    if missing:
        raise Unavailable(f"{mar}: serving it needs {missing[0].what}: {missing[0].install}")
    signature, probe = origin.signature, from_npz(members[PROBE])
    with unpacked(members) as folder:
        with raised_as(StageFailed, f"{mar}: the model was not loaded"):
            run = LOADERS[settings["kind"]](
                folder / origin.artifact.payload, settings, threads or int(settings["threads"])
            )
            inputs = [probe[spec.name] for spec in signature.inputs]
            outputs = [probe[output.name] for output in signature.outputs]
            for _ in range(WARM_CALLS):
                replay(run, inputs, outputs, float(settings["probe_atol"]))
            interface = infer_interface(lambda *arrays: run(arrays), signature)
            not_joined = "" if settings["joins_rows"] else NOT_SHOWN
            notes = [f"requests are not joined: {NOT_SHOWN}"] if not_joined else []
            if members[HANDLER] != handler_text():
                notes.append(f"{mar}: its handler is another version's, and is not run")
            model = ServedModel(
                name=name,
                kind=origin.artifact.kind,
                signature=signature,
                interface=replace(interface, rows_stay_first=bool(settings["rows_stay_first"])),
                call=lambda *arrays: run(arrays),
                not_joined=not_joined,
                forms=forms,
                folder=folder,
                classes=settings["classes"],
                specs=settings["inputs"],
                max_rows=int(settings["max_rows"]),
                notes=tuple(notes),
            )
        yield model
