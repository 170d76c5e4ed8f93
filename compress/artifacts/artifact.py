"""Artifact: a model as a directory whose manifest holds the hash of every file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict, Unpack

from pydantic import Field, JsonValue, field_validator

from compress.artifacts.carried_files import CARRIED_NAMES, CONFIG, names_in
from compress.artifacts.kinds import LOADED, artifact_class, known_kinds
from compress.artifacts.recipe import Recipe
from compress.common import atomic_files, sealed_json
from compress.common.config import Settings
from compress.common.counts import count
from compress.common.errors import ArtifactInvalid, PipelineInvalid, raised_as
from compress.common.forward import KeptModels, OpenedModel
from compress.common.lazy_modules import torch
from compress.common.printable import ShownInNotebooks
from compress.common.signature import Signature

MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**26  # larger than any manifest that this toolkit writes; more is refused unread
STREAMED = "streamed"
"""Fact of a model whose weights stay on disk: each call reads them part by part."""
WEIGHTS_ON_DISK = "its weights are read from disk in each call"
"""Why the latency of such a model is not measured."""
NOT_RUN = "not_run"
"""Fact of a file for devices that were not here when it was made: why nothing called it."""
CERTIFICATE = "certificate"
"""Fact: what a stage itself promises of its result, in words."""
CASCADE = "cascade"
"""Stage whose result answers some rows by a second model; a half of `val` chose which."""
SEALED_MODE = 0o444
FileVersion = tuple[str | int, ...]  # path, inode, size and times of a file
_known: dict[FileVersion, str] = {}  # SHA-256 of the files that this process has hashed


class FileDigest(Settings):
    """Size and hash of one file of an artifact."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]


class Step(Settings):
    """One stage in an artifact's lineage."""

    stage: str
    settings: dict[str, JsonValue] = {}  # gates left out
    inputs: dict[str, str] = {}
    """Digest of each artifact it read, by role."""


class Manifest(Settings):
    """Content of ``manifest.json``; without times and paths, so that its digest is reproducible."""

    version: Literal[1] = 1
    kind: str
    signature: Signature
    recipe: Recipe | None = None
    facts: dict[str, JsonValue] = {}
    """Results of the producing stage, such as counts and errors."""
    lineage: tuple[Step, ...] = ()
    files: dict[str, FileDigest] = {}

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not atomic_files.stays_inside(name) or name == MANIFEST:
                raise ValueError(f"{name[:80]!r} is not a file of an artifact")
        return files


class Details(TypedDict, total=False):
    """What is known of a model beside its files, when its artifact is written."""

    lineage: tuple[Step, ...]
    facts: dict[str, Any] | None
    """Results of the stage; they may still be filled while the files are written."""
    carried: Mapping[str, bytes] | None
    """Files beside the model, as :meth:`Artifact.carried_files` of the stage's input."""


class Artifact(ShownInNotebooks):
    """A model directory. Each format is a subclass, in the module of the stage that produces it."""

    kind: ClassVar[str]
    payload: ClassVar[str]
    """Name of the file to deploy."""
    opened_with: ClassVar[tuple[str, ...]] = ()
    """Modules that take seconds to import in :meth:`open`; imported before memory is measured."""
    memory_elsewhere: ClassVar[str] = ""
    """Why no artifact of this kind shows a call's memory in this process; empty if they do."""
    only_device: ClassVar[str] = ""
    """What it runs on whatever device is asked for, such as `cpu`; empty: on any."""
    reports_delegation: ClassVar[bool] = False
    """Whether the fact `delegated_share` says how much a backend computes."""
    reports_integer_share: ClassVar[bool] = False
    """Whether the fact `integer_share` says how much is multiplied by integer kernels."""
    generates: ClassVar[bool] = False
    """Whether it generates text by itself, with a cache; see :meth:`generation_speed`."""

    def __init__(self, path: Path, manifest: Manifest, digest: str) -> None:
        """Use :meth:`from_directory` instead."""
        self.path = path
        self.manifest = manifest
        self.signature: Signature = manifest.signature
        self.digest = digest  # SHA-256 of the manifest, which holds the hash of every file
        self._module: torch.nn.Module | None = None
        self.kept_models: KeptModels | None = None

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            LOADED[cls.kind] = cls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {self.digest[:12]})"

    def modules_to_open(self) -> tuple[str, ...]:
        """Return the modules that :meth:`open` imports, as far as known."""
        return self.opened_with

    @classmethod
    def from_directory(cls, path: Path | str) -> Self:
        """Open the artifact in a directory; ``Artifact`` itself opens any kind.

        Raises ArtifactInvalid: no readable manifest of this kind, or names or sizes differ.
        """
        artifact = cls.read_manifest(path)
        artifact.check_files()
        return artifact

    @classmethod
    def read_manifest(cls, path: Path | str) -> Self:
        """Return the artifact of a directory's manifest, unchecked, or raise ArtifactInvalid."""
        path = Path(path)
        try:
            with atomic_files.open_regular(path / MANIFEST, follow_link=False) as stream:
                raw = stream.read(MANIFEST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            # The results of a run hold the artifacts of its stages.
            names = sorted(str(file.parent) for file in path.glob(f"artifacts/*/{MANIFEST}"))
            hint = f"; name one of those in it: {', '.join(names)}" if names else ""
            raise ArtifactInvalid(f"{path}: not an artifact (it has no {MANIFEST}){hint}") from None
        except OSError as error:
            raise ArtifactInvalid(f"{path / MANIFEST}: {error.strerror}") from error
        return cls.from_manifest(raw, path)

    @classmethod
    def from_manifest(cls, raw: bytes, path: Path) -> Self:
        """Return a manifest's artifact; raise ArtifactInvalid if unreadable or of another kind."""
        if len(raw) > MANIFEST_BYTES:
            raise ArtifactInvalid(f"{path / MANIFEST}: has more than {MANIFEST_BYTES} bytes")
        manifest = sealed_json.parse_settings(Manifest, raw, path / MANIFEST, _load_manifest)
        kind = artifact_class(manifest.kind)
        if kind is None or not issubclass(kind, cls):
            expected = getattr(cls, "kind", " or ".join(known_kinds()))
            raise ArtifactInvalid(f"{path}: is {manifest.kind!r}, expected {expected}")
        artifact = kind(path, manifest, hashlib.sha256(raw).hexdigest())
        payload = artifact.payload_name
        if payload not in manifest.files:
            raise ArtifactInvalid(f"{path / MANIFEST}: files: {payload} is not among them")
        return artifact

    @classmethod
    @contextmanager
    def atomic_write(
        cls,
        path: Path,
        signature: Signature,
        *,
        recipe: Recipe | None = None,
        **details: Unpack[Details],
    ) -> Iterator[Path]:
        """Yield a temporary directory, which becomes the artifact.

        Raises PipelineInvalid where the path holds files that are no artifact.
        """
        # It is synced and renamed, and the manifest comes last: a directory without a manifest is
        # not an artifact, so a half-written one does not exist.
        facts = details.get("facts")
        _refuse_foreign(path)
        with atomic_files.partial_folder(path) as partial:
            for name, content in (details.get("carried") or {}).items():
                (partial / name).write_bytes(content)
            yield partial
            # Before they are hashed: it changes their ctime, by which they are known afterwards.
            protect(partial)
            written = files_below(partial)
            files = {name: _digest(partial / name) for name in written}
            manifest = Manifest(
                kind=cls.kind,
                signature=signature,
                recipe=recipe,
                facts={} if facts is None else facts,
                lineage=details.get("lineage", ()),
                files=files,
            )
            raw = sealed_json.dump_sealed(manifest.model_dump(mode="json"), indent=1)
            (partial / MANIFEST).write_bytes(raw)
            seal(partial)
            replace_artifact(partial, path)  # checks again what the path holds by now
            atomic_files.sync(path.parent)
            _known.update({_version(path / n, s): files[n].sha256 for n, s in written.items()})

    @property
    def payload_name(self) -> str:
        """Name of the file to deploy; some formats name it after the model."""
        return self.payload

    @property
    def payload_path(self) -> Path:
        """The file to deploy."""
        return self.path / self.payload_name

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the file to deploy."""
        return self.manifest.files[self.payload_name].bytes

    @property
    def model_files(self) -> dict[str, FileDigest]:
        """The files of the model, without those that it carries."""
        files = self.manifest.files
        return {name: files[name] for name in files if name not in CARRIED_NAMES}

    def carried_files(self) -> dict[str, bytes]:
        """Return the carried files (a Hugging Face tokenizer …), hashed now, for the next stage."""
        names = [name for name in CARRIED_NAMES if name in self.manifest.files]
        if names:
            self.check_files(hashed=names)
        return {name: (self.path / name).read_bytes() for name in names}

    def carried_json(self, name: str) -> Any:
        """Return the content of a carried JSON file, None without it, or raise ArtifactInvalid."""
        if name not in self.manifest.files:
            return None
        self.check_files(hashed=[name])
        with raised_as(ArtifactInvalid, f"{self.path / name}: not JSON"):
            return json.loads((self.path / name).read_text(encoding="utf-8"))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the first output's classes, in an ONNX file or a config; empty if unknown."""
        recorded: Any = self.manifest.facts.get("class_names")
        return tuple(recorded) if recorded else names_in(self.carried_json(CONFIG))

    def copy_files(self, names: Iterable[str], folder: Path) -> None:
        """Copy files of the artifact into a folder, where they keep their names."""
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.path / name, folder / name)

    def verify(self) -> None:
        """Hash every file again; raise ArtifactInvalid as :meth:`check_files`."""
        versions = self.file_versions()
        self.check_files(hashed=self.manifest.files)
        self.note_hashed(versions)

    def verify_cached(self) -> None:
        """Verify the files before they are loaded; raise ArtifactInvalid as :meth:`check_files`."""
        # A run opens an artifact many times. Files that this process has hashed are hashed again
        # only if their inode, size or times have changed.
        hashed = self.hashed_versions()
        unknown = {v: name for v, name in self.file_versions().items() if v not in hashed}
        if unknown:
            self.check_files(hashed=unknown.values())
        self.note_hashed(unknown)

    def file_versions(self) -> dict[FileVersion, str]:
        """Return the version of each file → its name; ArtifactInvalid as :meth:`check_files`."""
        return {_version(self.path / n, s): n for n, s in self._check_sizes().items()}

    def hashed_versions(self) -> dict[FileVersion, str]:
        """Return those of :meth:`file_versions` whose files this process has hashed as sealed."""
        files = self.manifest.files
        return {v: n for v, n in self.file_versions().items() if _known.get(v) == files[n].sha256}

    def note_hashed(self, versions: Mapping[FileVersion, str]) -> None:
        """Let :meth:`verify_cached` hash no file of these versions; another process has done it."""
        _known.update({v: self.manifest.files[name].sha256 for v, name in versions.items()})

    @contextmanager
    def keep_verified(self) -> Iterator[None]:
        """Let hashed files count as hashed after a block that links them, which changes ctimes."""
        before = {name: v for v, name in self.file_versions().items() if v in _known}
        yield
        for version, name in self.file_versions().items():
            if version[:-1] == before.get(name, ())[:-1]:
                _known[version] = _known[before[name]]

    def check_files(self, hashed: Iterable[str] = ()) -> None:
        """Compare names, sizes and some hashes with the manifest; ArtifactInvalid names a file."""
        self._check_sizes()
        for name in hashed:
            if _digest(self.path / name) != self.manifest.files[name]:
                raise ArtifactInvalid(f"{self.path}: {name} is not the file that was sealed")

    def _check_sizes(self) -> dict[str, os.stat_result]:
        """Return the stat of each file; raise ArtifactInvalid where names or sizes differ."""
        present = files_below(self.path)
        present.pop(MANIFEST, None)
        for name, expected in self.manifest.files.items():
            if name not in present:
                raise ArtifactInvalid(f"{self.path}: {name} is missing")
            if present[name].st_size != expected.bytes:
                raise ArtifactInvalid(f"{self.path}: {name} is not the file that was sealed")
        added = present.keys() - self.manifest.files.keys()
        if added:
            raise ArtifactInvalid(f"{self.path}: {min(added)} was added after sealing")
        return present

    @property
    def memory_unavailable_reason(self) -> str:
        """Why a call's memory cannot be measured in this process; empty where it can."""
        return self.memory_elsewhere

    @property
    def is_streamed(self) -> bool:
        """Whether a call reads the weights part by part: they may not fit into memory."""
        return bool(self.manifest.facts.get(STREAMED))

    @property
    def is_cascade(self) -> bool:
        """Whether some rows are answered by a second model, so that their calls take longer."""
        return any(step.stage == CASCADE for step in self.manifest.lineage)

    def runs_on(self, device: str) -> str:
        """Return the device on which :meth:`open` runs the model where one is asked for."""
        return self.only_device or device

    def open(self, device: str = "cpu", threads: int = 1) -> OpenedModel:
        """Load the model as a predictor with so many CPU threads.

        ``with artifact.open() as predict: predict(x)``, or ``artifact.open()(x)``.
        """
        raise NotImplementedError(f"{self.kind} artifacts cannot answer")

    def make_ready(self) -> None:
        """Do once what opening needs and does not count, such as an export; by default nothing."""

    def open_anew(self, device: str = "cpu", threads: int = 1) -> OpenedModel:
        """Load the model once more, though :meth:`keep_loaded` may keep one."""
        kept, self.kept_models = self.kept_models, None
        try:
            return self.open(device, threads)
        finally:
            self.kept_models = kept

    def generation_speed(
        self, prompt_tokens: int, tokens: int, threads: int
    ) -> tuple[float, float]:
        """Return milliseconds to the first generated token, and tokens a second after it.

        Raises Unavailable where the runtime that generates is not installed.
        """
        raise NotImplementedError(f"{self.kind} artifacts cannot generate")

    def load(self, device: str = "cpu") -> torch.nn.Module:
        """Return a new module that computes as the artifact does, in whatever runtime."""
        from compress.artifacts.meta_init import PredictorModule

        return PredictorModule(self.open(device, torch.get_num_threads()))

    @property
    def module(self) -> torch.nn.Module:
        """The model as a module on the CPU, loaded once."""
        if self._module is None:
            self._module = self.load()
        return self._module

    @contextmanager
    def keep_loaded(self) -> Iterator[None]:
        """Keep the model that the first :meth:`open` loads, for all calls in a block."""
        if self.kept_models is not None:
            yield
            return
        try:
            with KeptModels() as self.kept_models:
                yield
        finally:
            self.kept_models = None

    def parameters(self) -> int | None:
        """Return the number of weights that the producing stage counted, or None."""
        return self._int_fact("parameters")

    def macs(self, sizes: Mapping[str, int] | None = None) -> int | None:
        """Return the multiply-accumulates of a sample; None where the format has not the operators.

        Named axes have their number in `sizes`, by default 8 as in :meth:`Signature.example`.
        """
        return None if sizes else self._int_fact("macs")

    @property
    def not_run(self) -> str:
        """Why nothing called the model: it is for devices that were not here; else empty."""
        return str(self.manifest.facts.get(NOT_RUN, ""))

    def fact(self, name: str) -> Any:
        """Return an entry of the manifest's facts; raise ArtifactInvalid where it is missing."""
        if name not in self.manifest.facts:
            raise ArtifactInvalid(f"{self.path / MANIFEST}: facts: {name} is not among them")
        return self.manifest.facts[name]

    def _int_fact(self, fact: str) -> int | None:
        value = self.manifest.facts.get(fact)
        return value if isinstance(value, int) else None


def _version(file: Path, status: os.stat_result) -> FileVersion:
    return str(file), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def replace_artifact(new: Path, path: Path) -> None:
    """Rename a directory over an older artifact, if any; raise PipelineInvalid over other files."""
    _refuse_foreign(path)
    atomic_files.replace(new, path)


def _load_manifest(raw: bytes) -> Any:
    content = sealed_json.load_strictly(raw)
    # Earlier versions wrote no digest.
    is_sealed = isinstance(content, dict) and sealed_json.SEAL in content
    return sealed_json.load_sealed(raw) if is_sealed else content


def _refuse_foreign(path: Path) -> None:
    for _ in range(3):  # another thread may replace or remove it between opening and listing it
        try:
            names = os.listdir(path)  # noqa: PTH208 - of one directory, whichever has this name
        except FileNotFoundError:
            return
        if not names or MANIFEST in names:
            return
    raise PipelineInvalid(
        f"{path}: holds files that are not an artifact, and would be lost; move them or choose "
        "another directory"
    )


def files_below(folder: Path) -> dict[str, os.stat_result]:
    """Return the stat of each file below a folder, by name; raise ArtifactInvalid for links."""
    files: dict[str, os.stat_result] = {}
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                    continue
                # Another reader may follow a link, to files that were never hashed.
                status = entry.stat(follow_symlinks=False)
                atomic_files.refuse_irregular(path, status.st_mode)
                files[path.relative_to(folder).as_posix()] = status
    return dict(sorted(files.items()))


def _digest(file: Path) -> FileDigest:
    with atomic_files.open_regular(file, follow_link=False) as stream:
        size = os.fstat(stream.fileno()).st_size
        count("hashed.bytes", size)
        return FileDigest(sha256=hashlib.file_digest(stream, "sha256").hexdigest(), bytes=size)


def seal(folder: Path) -> None:
    """Write-protect and sync an artifact's files, before it is renamed to its final name."""
    protect(folder)
    for entry in sorted(folder.rglob("*"), reverse=True):
        atomic_files.sync(entry)
    atomic_files.sync(folder)


def protect(folder: Path) -> None:
    """Write-protect an artifact's files; hard links share their bytes, so no edit may be easy."""
    for entry in folder.rglob("*"):
        if entry.is_file() and stat.S_IMODE(entry.stat().st_mode) != SEALED_MODE:
            entry.chmod(SEALED_MODE)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to become `out`; PipelineInvalid if it holds files, or is in an artifact."""
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PipelineInvalid(f"{out}: exists; remove it, or choose another folder")
    if any((folder / MANIFEST).is_file() for folder in out.parents):
        raise PipelineInvalid(f"{out}: lies in an artifact, which holds its own files alone")
    with atomic_files.partial_folder(out) as partial:
        yield partial
        partial.replace(out)
