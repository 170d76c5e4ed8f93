"""TorchServeArchive: a validated model, packed so that TorchServe answers with it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ClassVar

from compress.artifacts.artifact import MANIFEST, Artifact, Manifest
from compress.common.atomic_files import sha256_of
from compress.common.errors import ArtifactInvalid
from serve.packaging.provenance import PROVENANCE, Provenance, digest_of, refuse_broken_chain
from serve.torchserve.handler_bundle import handler_text
from serve.torchserve.mar_file import (
    CONFIG,
    HANDLER,
    MAR_MANIFEST,
    mar_manifest,
    model_name_of,
    read_mar,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from compress.common.forward import Predictor

PROBE = "probe.npz"


def refuse_bare(path: Path, command: str) -> None:
    """Refuse a file that is no ``.mar``: alone it says neither its hash nor what the model takes.

    Raises:
        ArtifactInvalid: what the command takes, and what to run instead.
    """
    if path.suffix == ".mar":
        return
    known = (path.parent / MANIFEST).is_file()
    instead = f"run compress {command} {path.parent}" if known else f"no {MANIFEST} lies beside it"
    raise ArtifactInvalid(
        f"{path}: compress {command} takes an artifact's directory, or a .mar: {instead}"
    )


def refuse_other(file: Path, sha256: str | None) -> None:
    """Refuse a file that is not the one which somebody was told of.

    Raises:
        ArtifactInvalid: it hashes to something else.
    """
    if sha256 is not None and sha256_of(file) != sha256.lower():
        raise ArtifactInvalid(f"{file}: sha256 is {sha256_of(file)}, expected {sha256}")


def refuse_other_artifact(artifact: Artifact, sha256: str | None) -> None:
    """Refuse an artifact whose digest and whose deployed file are both not what was told.

    The file's hash is the manifest's here: hash the files before or after.

    Raises:
        ArtifactInvalid: neither is.
    """
    found = artifact.manifest.files[artifact.payload_name].sha256
    if sha256 is not None and sha256.lower() not in (found, artifact.digest):
        raise ArtifactInvalid(
            f"{artifact.payload_path}: sha256 is {found}, expected {sha256}, which is not the "
            f"artifact's digest {artifact.digest} either"
        )


class TorchServeArchive(Artifact):
    """A ``.mar`` with the model, our handler, and a probe that a worker replays before it answers.

    ``open`` starts a real TorchServe on loopback and predicts over HTTP. While it is open or held,
    further ``open`` calls on the same object share that server.
    The model is served on the CPU, whichever device is asked for.
    """

    kind: ClassVar[str] = "torchserve"
    payload: ClassVar[str] = "model.mar"
    memory_elsewhere: ClassVar[str] = (
        "TorchServe answers, in processes of its own; ask it of the model that is packaged"
    )

    def __init__(self, path: Path, manifest: Manifest, digest: str) -> None:
        """Use :meth:`at` instead."""
        super().__init__(path, manifest, digest)
        self._serving: dict[int, Predictor] = {}
        self._holding: ExitStack | None = None

    @contextmanager
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Serve the model, and give the server as a predictor.

        Raises:
            ArtifactInvalid: the archive is not as it was sealed, or its code is not this version's
                own, so it is not started.
            Unavailable: Java or TorchServe is missing.
            StageFailed: no worker became ready.
        """
        if threads in self._serving:
            yield self._serving[threads]
        elif self._holding is not None:
            yield self._holding.enter_context(self._served(threads))
        else:
            with self._served(threads) as predict:
                yield predict

    @contextmanager
    def keep_loaded(self, device: str = "cpu", threads: int = 1) -> Iterator[None]:
        """Keep the server that the first :meth:`open` starts, if any, up until the end."""
        if self._holding is not None:
            yield
            return
        try:
            with ExitStack() as self._holding:
                yield
        finally:
            self._holding = None

    @contextmanager
    def _served(self, threads: int) -> Iterator[Predictor]:
        from serve.client.client import Client, as_predictor
        from serve.torchserve.process import TorchServe

        self.check()
        with (
            TorchServe(self.payload_path, threads=threads) as server,
            Client(
                server.url,
                server.model_name,
                self.signature,
                token=server.token,
                max_rows=self.max_rows,
            ) as client,
        ):
            self._serving[threads] = as_predictor(client)
            try:
                yield self._serving[threads]
            finally:
                del self._serving[threads]

    @property
    def max_rows(self) -> int:
        """Rows that one request may hold."""
        return int(str(self.fact("max_rows")))

    def check(self) -> tuple[dict[str, bytes], Provenance]:
        """Return the members of the ``.mar`` and where its model comes from, all of it checked.

        A ``.mar`` is code, so this comes before it is started or asked anything. That its hash is
        the manifest's says little: whoever plants a handler can write the manifest anew.

        Raises:
            ArtifactInvalid: a file or member was altered or added, or the code in the archive is
                not this version's own.
        """
        mar = self.payload_path
        members = read_mar(mar)
        origin = check_members(members, str(mar))  # first: it names the member
        if digest_of(members[PROVENANCE]).sha256 != self.manifest.facts.get("provenance"):
            raise ArtifactInvalid(f"{mar}: member {PROVENANCE} is not the one that was sealed")
        self.verify()
        check_code(members, origin, mar)
        lineage = self.manifest.lineage
        packaged = lineage[-1].inputs.get("input") if lineage else None
        if packaged != origin.artifact.origin or origin.lineage != lineage[:-1]:
            raise ArtifactInvalid(
                f"{mar}: {PROVENANCE} names artifact {origin.artifact.origin}, "
                f"and the manifest's lineage {packaged}"
            )
        if origin.signature != self.signature:
            raise ArtifactInvalid(f"{mar}: {PROVENANCE} has another signature than the manifest")
        return members, origin


def check_bare(mar: Path) -> tuple[dict[str, bytes], Provenance]:
    """Return the members of a bare ``.mar`` and what it says of itself, both checked.

    Raises:
        ArtifactInvalid: a member was altered or added, or the code is not this version's own.
    """
    members = read_mar(mar)
    origin = check_members(members, str(mar))
    check_code(members, origin, mar)
    return members, origin


def check_members(members: Mapping[str, bytes], where: str) -> Provenance:
    """Return the provenance that an archive carries, every other member held against it.

    Raises:
        ArtifactInvalid: a member is missing, altered or added; the message names it.
    """
    if PROVENANCE not in members:
        raise ArtifactInvalid(f"{where}: member {PROVENANCE} is missing")
    origin = Provenance.read(members[PROVENANCE], where)
    recorded = {PROVENANCE, *origin.members}
    for name in sorted(recorded | set(members)):
        if name not in members:
            raise ArtifactInvalid(f"{where}: member {name} is missing")
        if name not in recorded:
            raise ArtifactInvalid(f"{where}: member {name} was added after packing")
        if name != PROVENANCE and digest_of(members[name]) != origin.members[name]:
            raise ArtifactInvalid(f"{where}: member {name} is not the file that was packed")
    for needed in (HANDLER, CONFIG, PROBE, origin.artifact.payload):
        if needed not in members:
            raise ArtifactInvalid(f"{where}: member {needed} is missing")
    if digest_of(members[origin.artifact.payload]).sha256 != origin.artifact.sha256:
        raise ArtifactInvalid(
            f"{where}: member {origin.artifact.payload} is not the payload of the artifact that "
            f"{PROVENANCE} names"
        )
    refuse_broken_chain(origin, where)
    return origin


def check_code(members: Mapping[str, bytes], origin: Provenance, mar: Path) -> None:
    """Raise unless the code in an archive is this version's own, and is what will be run.

    Hashes do not tell: whoever writes a handler can record its hash too. Nor may native code pass
    for another kind, by which it would be started unasked.

    Raises:
        ArtifactInvalid: the handler, or the manifest that names it, is another one, or the payload
            would be loaded as another kind than the archive says it is.
    """
    ours = {
        HANDLER: handler_text(),
        MAR_MANIFEST: mar_manifest(model_name_of(mar), origin.artifact.payload),
    }
    for name, expected in ours.items():
        if members.get(name) != expected:
            raise ArtifactInvalid(
                f"{mar}: member {name} is not the one that this version writes, so nothing in it "
                "is run; verify it with the version that packed it, or package the model again"
            )
    kind = _kind_loaded(members[CONFIG])
    if kind != origin.artifact.kind:
        raise ArtifactInvalid(
            f"{mar}: member {CONFIG} says that {kind!r} is loaded, and {PROVENANCE} that the "
            f"artifact is {origin.artifact.kind!r}, so it is not started"
        )


def _kind_loaded(config: bytes) -> object:
    """Return as what the handler would load the payload; None where that cannot be read."""
    import yaml

    try:
        return yaml.safe_load(config)["handler"]["kind"]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return None
