"""A model at rest: a sealed directory that says what it is and proves that nothing changed.

An artifact is written under a temporary name, synced and renamed; ``manifest.json`` comes last.
A directory without a manifest is not an artifact, so a half-written one does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, ValidationError, field_validator

from compress.artifacts.recipe import Recipe
from compress.common.atomic_files import (
    open_regular,
    partial_path,
    refuse_irregular,
    replace,
    stays_inside,
    sync,
)
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, PipelineInvalid, first_line
from compress.common.signature import Signature
from compress.common.strict_json import reject_duplicate_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from compress.common.forward import Predictor

MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**26
"""More than any manifest of ours holds."""
_known: dict[tuple[str | int, ...], str] = {}
"""SHA-256 of files that this process hashed: by path, inode, size, and times of change."""


class FileDigest(Settings):
    """Size and hash of one file of an artifact."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]


class Step(Settings):
    """One stage in an artifact's lineage."""

    stage: str
    """The stage's type."""
    settings: dict[str, JsonValue] = {}
    """Its settings, gates left out."""
    inputs: dict[str, str] = {}
    """Digest of each artifact it read, by role."""


class Manifest(Settings):
    """What an artifact says about itself; no time and no path, so its digest is stable."""

    version: Literal[1] = 1
    kind: str
    signature: Signature
    recipe: Recipe | None = None
    facts: dict[str, JsonValue] = {}
    """What the producing stage found out."""
    lineage: tuple[Step, ...] = ()
    files: dict[str, FileDigest] = {}

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not stays_inside(name) or name == MANIFEST:
                raise ValueError(f"{name[:80]!r} is no file of an artifact")
        return files


class Artifact:
    """A sealed directory. Each format is a subclass, beside the stage that produces it."""

    kind: ClassVar[str]
    payload: ClassVar[str]
    """Name of the file that a user would deploy."""
    opened_with: ClassVar[tuple[str, ...]] = ()
    """Modules that :meth:`open` imports for seconds; what measures memory imports them first."""
    memory_elsewhere: ClassVar[str] = ""
    """Why the memory of a call is never seen with artifacts of this kind; empty where it can be."""
    _kinds: ClassVar[dict[str, type[Artifact]]] = {}

    def __init__(self, path: Path, manifest: Manifest, digest: str) -> None:
        """Use :meth:`at` instead."""
        self.path = path
        self.manifest = manifest
        self.digest = digest
        """SHA-256 of the manifest, which holds the hash of every file."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            Artifact._kinds[cls.kind] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {self.digest[:12]})"

    @classmethod
    def from_directory(cls, path: Path | str) -> Self:
        """Read the artifact in a directory; on ``Artifact`` itself, of whichever kind it is.

        Names and sizes of its files are compared with the manifest; :meth:`verify` hashes them too.

        Raises:
            ArtifactInvalid: no manifest, an unreadable one, one of another kind, or files that are
                not those of the manifest.
        """
        artifact = cls.read_manifest(path)
        artifact.check_files()
        return artifact

    @classmethod
    def read_manifest(cls, path: Path | str) -> Self:
        """Return the artifact that the manifest in a directory describes, whatever its files are.

        Raises:
            ArtifactInvalid: no manifest, an unreadable one, or one of another kind.
        """
        path = Path(path)
        try:
            with open_regular(path / MANIFEST, follow_link=False) as stream:
                raw = stream.read(MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactInvalid(f"{path}: not an artifact (it has no {MANIFEST})") from None
        except OSError as error:
            raise ArtifactInvalid(f"{path / MANIFEST}: {error.strerror}") from error
        return cls.from_manifest(raw, path)

    @classmethod
    def from_manifest(cls, raw: bytes, path: Path) -> Self:
        """Return the artifact that a manifest describes, whether or not it lies at the path yet.

        Raises:
            ArtifactInvalid: the manifest is unreadable, or one of another kind.
        """
        if len(raw) > MANIFEST_BYTES:
            raise ArtifactInvalid(f"{path / MANIFEST}: has more than {MANIFEST_BYTES} bytes")
        try:
            json.loads(raw, object_pairs_hook=reject_duplicate_keys)
            manifest = Manifest.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ArtifactInvalid(f"{path / MANIFEST}: {place}: {first['msg']}") from error
        except (ValueError, RecursionError) as error:
            raise ArtifactInvalid(f"{path / MANIFEST}: {first_line(error)}") from error
        kind = Artifact._kinds.get(manifest.kind)
        if kind is None or not issubclass(kind, cls):
            expected = getattr(cls, "kind", " or ".join(sorted(Artifact._kinds)))
            raise ArtifactInvalid(f"{path}: is {manifest.kind!r}, expected {expected}")
        artifact = kind(path, manifest, hashlib.sha256(raw).hexdigest())
        if artifact.payload_name not in manifest.files:
            missing = artifact.payload_name
            raise ArtifactInvalid(f"{path / MANIFEST}: files: {missing} is not among them")
        return artifact

    @classmethod
    @contextmanager
    def atomic_write(
        cls,
        path: Path,
        signature: Signature,
        *,
        recipe: Recipe | None = None,
        lineage: tuple[Step, ...] = (),
        facts: dict[str, Any] | None = None,
    ) -> Iterator[Path]:
        """Give a temporary directory to write the files into; on success it becomes the artifact.

        ``facts`` may be filled while the directory is being written.

        Raises:
            PipelineInvalid: there is something else at the path.
        """
        facts = {} if facts is None else facts
        _refuse_foreign(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_path(path)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            files = {name: _digest(partial / name) for name in files_below(partial)}
            manifest = Manifest(
                kind=cls.kind,
                signature=signature,
                recipe=recipe,
                facts=facts,
                lineage=lineage,
                files=files,
            )
            text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True)
            (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")
            seal(partial)
            replace_artifact(partial, path)
            sync(path.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @property
    def signature(self) -> Signature:
        """The model's interface."""
        return self.manifest.signature

    @property
    def payload_name(self) -> str:
        """Name of the file that a user would deploy; some formats name it after the model."""
        return self.payload

    @property
    def payload_path(self) -> Path:
        """The file that a user would deploy."""
        return self.path / self.payload_name

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the file that a user would deploy."""
        return self.manifest.files[self.payload_name].bytes

    def verify(self) -> None:
        """Hash every file again.

        Raises:
            ArtifactInvalid: a file is missing, altered, a link, or was added; the message names it.
        """
        self.check_files(hashed=self.manifest.files)

    def verify_cached(self) -> None:
        """Do what :meth:`verify` does, before the files are loaded.

        What this process has hashed, and nobody has written since by what the file system says, is
        not hashed again: artifacts are opened many times in a run.

        Raises:
            ArtifactInvalid: a file is missing, altered, a link, or was added; the message names it.
        """
        hashed = {
            name: (str(self.path / name), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
            for name, s in self._present().items()
        }
        digests = {name: file.sha256 for name, file in self.manifest.files.items()}
        unknown = [name for name in digests if _known.get(hashed[name]) != digests[name]]
        self.check_files(hashed=unknown)
        _known.update({hashed[name]: digests[name] for name in unknown})

    def check_files(self, hashed: Iterable[str] = ()) -> None:
        """Compare the names and sizes of all files with the manifest, and the hashes of some.

        Args:
            hashed: names of the files to hash.

        Raises:
            ArtifactInvalid: a file is missing, altered, a link, or was added; the message names it.
        """
        self._present()
        for name in hashed:
            if _digest(self.path / name) != self.manifest.files[name]:
                raise self._altered(name)

    def _present(self) -> dict[str, os.stat_result]:
        """Return the files that are here, which are those of the manifest, of the same sizes."""
        present = files_below(self.path)
        present.pop(MANIFEST, None)
        for name, expected in self.manifest.files.items():
            if name not in present:
                raise ArtifactInvalid(f"{self.path}: {name} is missing")
            if present[name].st_size != expected.bytes:
                raise self._altered(name)
        added = present.keys() - self.manifest.files.keys()
        if added:
            raise ArtifactInvalid(f"{self.path}: {min(added)} was added after sealing")
        return present

    def _altered(self, name: str) -> ArtifactInvalid:
        return ArtifactInvalid(f"{self.path}: {name} is not the file that was sealed")

    @property
    def memory_unavailable_reason(self) -> str:
        """Why the process that asks does not show what memory a call takes; empty where it does."""
        return self.memory_elsewhere

    def open(self, device: str = "cpu", threads: int = 1) -> AbstractContextManager[Predictor]:
        """Load the model and give a predictor for the duration of a ``with`` block."""
        raise NotImplementedError(f"{self.kind} artifacts cannot answer")

    @contextmanager
    def keep_loaded(self, device: str = "cpu", threads: int = 1) -> Iterator[None]:
        """Keep what is costly to start, such as a server, up between several :meth:`open`."""
        yield

    def parameters(self) -> int | None:
        """Return the number of weights, as counted when it was made; None where it was not."""
        return self._counted("parameters")

    def macs(self) -> int | None:
        """Return the multiply-accumulates for one sample, as counted when it was made, or None."""
        return self._counted("macs")

    def fact(self, name: str) -> Any:
        """Return what the producing stage found out.

        Raises:
            ArtifactInvalid: the manifest does not say.
        """
        if name not in self.manifest.facts:
            raise ArtifactInvalid(f"{self.path / MANIFEST}: facts: {name} is not among them")
        return self.manifest.facts[name]

    def _counted(self, fact: str) -> int | None:
        value = self.manifest.facts.get(fact)
        return value if isinstance(value, int) else None


def replace_artifact(new: Path, path: Path) -> None:
    """Rename a directory to its place, where at most an older artifact may be.

    Raises:
        PipelineInvalid: there is something else.
    """
    _refuse_foreign(path)
    replace(new, path)


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not (path / MANIFEST).is_file() and any(path.iterdir()):
        raise PipelineInvalid(
            f"{path}: holds files that are no artifact, and would be lost; move them or choose "
            "another directory"
        )


def files_below(folder: Path) -> dict[str, os.stat_result]:
    """Return what is known of each file below a folder, by its name relative to it, sorted.

    Raises:
        ArtifactInvalid: a link, a pipe or a device is among them: another reader may follow a link
            to files that were never sealed.
    """
    found: dict[str, os.stat_result] = {}
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                    continue
                about = entry.stat(follow_symlinks=False)
                refuse_irregular(path, about.st_mode)
                found[path.relative_to(folder).as_posix()] = about
    return dict(sorted(found.items()))


def _digest(file: Path) -> FileDigest:
    with open_regular(file, follow_link=False) as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(sha256=sha256, bytes=os.fstat(stream.fileno()).st_size)


def seal(folder: Path) -> None:
    """Write-protect and sync an artifact's files, before it gets a name of its own."""
    for entry in sorted(folder.rglob("*"), reverse=True):
        if entry.is_file():
            entry.chmod(0o444)  # hard links share these bytes: an edit in place must not be easy
        sync(entry)
    sync(folder)
