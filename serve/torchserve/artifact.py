"""The `torchserve` artifact: a model packed as a ``.mar`` for TorchServe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from compress.artifacts.artifact import MANIFEST, Artifact, Manifest
from compress.artifacts.carried_files import TOKENIZER
from compress.common.atomic_files import sha256_of
from compress.common.errors import ArtifactInvalid
from compress.common.forward import OpenedModel, Predictor, opened_model
from compress.common.lazy_modules import torch
from compress.serve.packaging.provenance import (
    PROVENANCE,
    Provenance,
    digest_of,
    refuse_broken_chain,
)
from compress.serve.torchserve import mar_file
from compress.serve.torchserve.mar_file import CONFIG, HANDLER, MAR_MANIFEST, read_mar

PROBE = "probe.npz"
SERVER_SETTINGS = {
    *("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout"),
    *("startupTimeout", "maxRetryTimeoutInSec", "jobQueueSize", "handler"),
}
"""Entries of `model-config.yaml`; others have TorchServe start programs, such as torchrun."""
HANDLER_SETTINGS = {
    *("kind", "threads", "max_rows", "rows_stay_first", "joins_rows", "probe_atol"),
    *("inputs", "outputs", "classes", "image", "text", "audio"),
    *("built_for", "optimize_for_inference", "one_call_at_a_time"),
}
"""Entries of its section `handler`."""


class TorchServeArchive(Artifact):
    """A ``.mar`` with the model, our handler, and a probe that a worker replays before it is ready.

    ``open`` starts TorchServe on loopback and predicts over HTTP. Until it is closed, or within
    ``keep_loaded``, further ``open`` calls on the same object share that server. The model runs on
    the CPU, whatever `device` is.
    """

    kind: ClassVar[str] = "torchserve"
    payload: ClassVar[str] = "model.mar"
    only_device: ClassVar[str] = "cpu"
    memory_elsewhere: ClassVar[str] = (
        "TorchServe runs the model in processes of its own; measure the packaged artifact instead"
    )

    def __init__(self, path: Path, manifest: Manifest, digest: str) -> None:
        super().__init__(path, manifest, digest)
        self._predictors: dict[int, Predictor] = {}

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Start TorchServe, once the archive was checked; yield a predictor that calls it."""
        from compress.serve.torchserve.process import TorchServe

        def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = client.predict([tensor.detach().cpu().numpy() for tensor in inputs])
            return tuple(torch.from_numpy(output) for output in outputs)

        if threads in self._predictors:
            yield self._predictors[threads]
            return
        self.check()
        with (
            TorchServe(self.payload_path, threads=threads) as server,
            server.client(self.signature, self.max_rows) as client,
        ):
            self._predictors[threads] = predict
            try:
                yield predict
            finally:
                del self._predictors[threads]

    def open_anew(self, device: str = "cpu", threads: int = 1) -> OpenedModel:
        """Return what :meth:`open` does: the model lies in memory of the server's."""
        return self.open(device, threads)

    @property
    def max_rows(self) -> int:
        """Most rows of one request."""
        return int(str(self.fact("max_rows")))

    def check(self, *, runs_handler: bool = True) -> tuple[dict[str, bytes], Provenance]:
        """Verify the ``.mar``, and the handler if that is run; return members and provenance."""
        # An archive contains code, so it is checked before it is started. That its hash is the
        # manifest's is not enough: whoever plants a handler can rewrite the manifest too.
        mar = self.payload_path
        members = read_mar(mar)
        origin = check_members(members, str(mar))  # first: it names the member
        if digest_of(members[PROVENANCE]).sha256 != self.manifest.facts.get("provenance"):
            raise ArtifactInvalid(f"{mar}: member {PROVENANCE} is not the one that was sealed")
        self.verify()
        check_code(members, origin, mar, runs_handler=runs_handler)
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


def check_bare_mar(
    mar: Path, sha256: str | None = None, *, runs_handler: bool = True
) -> tuple[dict[str, bytes], Provenance]:
    """Verify a ``.mar`` without its artifact's directory; return its members and provenance.

    It must have the expected SHA-256, if any, and this version's handler if that is run.
    """
    if mar.suffix != ".mar":
        hint = f"no {MANIFEST} beside it"
        if (mar.parent / MANIFEST).is_file():
            hint = f"run compress verify {mar.parent}"
        raise ArtifactInvalid(
            f"{mar}: compress verify takes an artifact's directory, or a .mar: {hint}"
        )
    if sha256 is not None and (found := sha256_of(mar)) != sha256.lower():
        raise ArtifactInvalid(f"{mar}: sha256 is {found}, expected {sha256}")
    members = read_mar(mar)
    origin = check_members(members, str(mar))
    check_code(members, origin, mar, runs_handler=runs_handler)
    return members, origin


def check_members(members: Mapping[str, bytes], where: str) -> Provenance:
    """Return the archive's provenance record; ArtifactInvalid names a member that differs."""
    if PROVENANCE not in members:
        raise ArtifactInvalid(f"{where}: member {PROVENANCE} is missing")
    origin = Provenance.read(members[PROVENANCE], where)
    recorded = {PROVENANCE, *origin.members}
    needed = {HANDLER, CONFIG, PROBE, origin.artifact.payload}
    for name in sorted(recorded | needed | members.keys()):
        if name not in members:
            raise ArtifactInvalid(f"{where}: member {name} is missing")
        if name not in recorded:
            raise ArtifactInvalid(f"{where}: member {name} was added after packing")
        if name != PROVENANCE and digest_of(members[name]) != origin.members[name]:
            raise ArtifactInvalid(f"{where}: member {name} is not the file that was packed")
    if digest_of(members[origin.artifact.payload]).sha256 != origin.artifact.sha256:
        raise ArtifactInvalid(
            f"{where}: member {origin.artifact.payload} is not the payload of the artifact that "
            f"{PROVENANCE} names"
        )
    refuse_broken_chain(origin, where)
    return origin


def check_code(
    members: Mapping[str, bytes], origin: Provenance, mar: Path, *, runs_handler: bool
) -> None:
    """Raise ArtifactInvalid for code that is not this version's, or a payload of another kind."""
    import yaml

    # Hashes do not show that: whoever writes a handler can record its hash too.
    ours = {
        HANDLER: mar_file.handler_text(),
        MAR_MANIFEST: mar_file.mar_manifest(mar_file.model_name_of(mar), origin.artifact.payload),
    }
    for name, expected in ours.items():
        if name == HANDLER and not runs_handler:
            continue
        if members.get(name) != expected:
            raise ArtifactInvalid(
                f"{mar}: member {name} is not the one that this version writes, so nothing in it "
                "is run; verify it with the version that packed it, or package the model again"
            )
    # Its writer's bytes, so that the server's reader, in Java, finds the same in it.
    try:
        content: Any = yaml.safe_load(members[CONFIG])
        handler = content["handler"]
        tokenizer = handler.get("text", {}).get("tokenizer", TOKENIZER)
        is_ours = yaml.safe_dump(content, sort_keys=True).encode() == members[CONFIG]
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise ArtifactInvalid(f"{mar}: member {CONFIG} is not as package_torchserve writes it")
    unknown = [*(content.keys() - SERVER_SETTINGS), *(handler.keys() - HANDLER_SETTINGS)]
    if unknown or tokenizer != TOKENIZER:
        entry = unknown[0] if unknown else f"handler.text.tokenizer: {tokenizer!r}"
        raise ArtifactInvalid(
            f"{mar}: member {CONFIG}: {entry}: unknown entry, which may name programs to start or "
            "files to read"
        )
    # Native code must not be declared as another kind, to be started without the user's consent.
    if (kind := handler.get("kind")) != origin.artifact.kind:
        raise ArtifactInvalid(
            f"{mar}: member {CONFIG} says that {kind!r} is loaded, and {PROVENANCE} that the "
            f"artifact is {origin.artifact.kind!r}, so it is not started"
        )
