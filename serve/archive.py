"""TorchServeArchive: a validated model, packed so that TorchServe answers with it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, ClassVar

from compress.core.artifact import MANIFEST, Artifact, Manifest, Predictor
from compress.core.errors import ArtifactInvalid
from compress.core.files import sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
    if sha256 is not None and file.is_file() and sha256_of(file) != sha256.lower():
        raise ArtifactInvalid(f"{file}: sha256 is {sha256_of(file)}, expected {sha256}")


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
            ArtifactInvalid: the ``.mar`` is not the file that was sealed; it is code, so it is
                not started.
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
    def held(self, device: str = "cpu", threads: int = 1) -> Iterator[None]:
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
        from serve.client import Client, as_predictor
        from serve.server import TorchServe

        self.check_payload()
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
        return int(str(self.manifest.facts["max_rows"]))

    def check_payload(self) -> None:
        """Raise unless the ``.mar`` is the file that was sealed.

        Raises:
            ArtifactInvalid: it is missing or altered.
        """
        try:
            found = sha256_of(self.payload_path)
        except FileNotFoundError:
            raise ArtifactInvalid(f"{self.path}: {self.payload} is missing") from None
        if found != self.manifest.files[self.payload].sha256:
            raise ArtifactInvalid(
                f"{self.path}: {self.payload} is not the file that was sealed; "
                "a .mar is code, so it is not started; package the model again"
            )
