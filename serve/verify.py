"""Verify an artifact: every hash, its origin, and for a ``.mar`` its chain and served outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from compress.artifacts.artifact import Artifact
from compress.common.atomic_files import sha256_of
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, Unavailable
from compress.export.imported.exported_files import refuse_wrong_artifact_hash
from compress.serve.packaging.provenance import PROVENANCE, Provenance
from compress.serve.torchserve.artifact import PROBE, TorchServeArchive, check_bare_mar
from compress.serve.worker.wire import from_npz

if TYPE_CHECKING:
    from compress.data.splits import Splits
    from compress.serve.worker.tensors import Array

    Answer = Callable[[Sequence[Array]], tuple[Array, ...]]
    Pairs = Iterable[tuple[Sequence[Array], Sequence[Array]]]


class Replay(Settings):
    """A comparison of served outputs with recorded ones, or with the packaged artifact's."""

    what: str
    samples: int
    largest_difference: float


class Proof(Settings):
    """The result of verifying an artifact."""

    version: Literal[1] = 1
    kind: str
    sha256: str
    """SHA-256 of the deployed file."""
    digest: str | None = None
    """SHA-256 of the artifact's manifest; None for a bare archive."""
    anchors: tuple[str, ...] = ()
    """Sources outside the artifact that confirm its digest or its file's hash."""
    served_by: str | None = None
    replays: tuple[Replay, ...] = ()
    proven: tuple[str, ...]
    """Each verified property, as a line of text."""
    unproven: tuple[str, ...] = ()
    """Each property that could not be verified, and why."""

    def with_lines(self, *lines: str, **changed: Any) -> Proof:
        """Return a copy with more verified properties."""
        return self.model_copy(update={"proven": (*self.proven, *lines), **changed})

    def lacking(self, line: str) -> Proof:
        """Return a copy with a property that could not be verified."""
        return self.model_copy(update={"unproven": (*self.unproven, line)})

    def summary_lines(self) -> Iterator[str]:
        """Yield all lines for the terminal."""
        yield from (f"proven: {line}" for line in self.proven)
        yield from (f"not proven: {line}" for line in self.unproven)


@dataclass(frozen=True)
class Evidence:
    """What the run that made an archive offers to verify it with."""

    artifacts: Mapping[str, Artifact]
    """The run's artifacts by digest."""
    source: Mapping[str, Any]
    """Current hashes of the imported model's checkpoint and code."""
    data: Splits | None
    missing: str = ""
    """Why there is no data."""


def prove_chain(proof: Proof, origin: Provenance, evidence: Evidence | None, where: str) -> Proof:
    """Verify each artifact from the source to the archive; return the extended proof."""
    history = origin.history
    if history is None:
        return proof.lacking("the stages' artifacts: the archive was packed outside a run")
    names = {stage.digest: stage.name for stage in history.stages}
    chain = {history.source_digest: "source"} | names
    path = " → ".join(f"{name} {digest[:12]}" for digest, name in chain.items())
    proof = proof.with_lines(f"each stage read what the one before it made: {path}")
    if evidence is None:
        return proof
    absent = [name for digest, name in chain.items() if digest not in evidence.artifacts]
    for digest, name in chain.items():
        if name not in absent:
            evidence.artifacts[digest].verify()
    here = len(chain) - len(absent)
    proof = proof.with_lines(f"{here} of these {len(chain)} artifacts are here, as sealed")
    if absent:
        proof = proof.lacking(f"{', '.join(absent)}: not here")
    for part, recorded in history.source.items():
        if part in evidence.source and evidence.source[part] != recorded:
            raise ArtifactInvalid(
                f"{where}: the {part} of the input model was {recorded}, and is now "
                f"{evidence.source[part]}"
            )
    known = [part for part in ("checkpoint", "code") if evidence.source.get(part)]
    if known:
        proof = proof.with_lines(f"the source's {' and '.join(known)} hash to what is recorded")
    return proof


def prove_answers(
    proof: Proof,
    mar: Path,
    members: Mapping[str, bytes],
    origin: Provenance,
    evidence: Evidence | None,
) -> Proof:
    """Serve the archive and return the extended proof; outputs may differ by `probe_atol`."""
    from compress.serve.torchserve.served_archive import handler_settings

    settings = handler_settings(members)
    max_rows = int(settings["max_rows"])
    with start_serving(mar, members, origin, max_rows) as (answer, served_by):
        probe = from_npz(members[PROBE])
        inputs = [probe[spec.name] for spec in origin.signature.inputs]
        outputs = [probe[output.name] for output in origin.signature.outputs]
        replays = [compare_outputs("the recorded probe", [(inputs, outputs)], answer)]
        packaged = evidence.artifacts.get(origin.artifact.origin) if evidence else None
        if packaged is not None and evidence is not None and evidence.data is not None:
            pairs = validation_pairs(packaged, evidence.data, max_rows)
            replays.append(compare_outputs("the validation split", pairs, answer))
    for replay in replays:
        if not replay.largest_difference <= float(settings["probe_atol"]):
            raise ArtifactInvalid(
                f"{mar}: {PROBE if replay is replays[0] else replay.what}: the served answers "
                f"differ by {replay.largest_difference:.3g}"
            )
    lines = (
        f"{served_by} answered {replay.what} ({replay.samples} samples); largest difference "
        f"{replay.largest_difference:.3g}"
        for replay in replays
    )
    proof = proof.with_lines(*lines, served_by=served_by, replays=tuple(replays))
    if len(replays) > 1:
        return proof
    why = evidence.missing if evidence else "it is not in a run's folder"
    return proof.lacking(f"the validation split: {why or 'the packaged artifact is not here'}")


@contextmanager
def start_serving(
    mar: Path, members: Mapping[str, bytes], origin: Provenance, max_rows: int
) -> Iterator[tuple[Answer, str]]:
    """Serve an archive by TorchServe, else as the built-in server; yield predictor and name."""
    from compress.serve.torchserve import process
    from compress.serve.torchserve.served_archive import load_archive

    try:
        process.find_torchserve()
    except Unavailable as missing:
        with load_archive(mar, members, origin, "") as model:
            answer = f"the built-in server's loader, without TorchServe ({missing}),"
            yield lambda inputs: tuple(model.call(*inputs)), answer
        return
    with process.TorchServe(mar) as server, server.client(origin.signature, max_rows) as client:
        yield client.predict, "TorchServe"


def validation_pairs(packaged: Artifact, data: Splits, max_rows: int) -> Pairs:
    """Yield the validation split's inputs and the packaged artifact's outputs for them."""
    fixed = packaged.signature.batch_axis is None
    rows = packaged.signature.inputs[0].shape[:1][0] if fixed else min(max_rows, data.batch_size)
    with packaged.open() as predict:
        for batch in data.batches("val", batch_size=int(rows)):
            if fixed and len(batch.inputs[0]) != rows:
                continue  # the last, smaller batch
            outputs = predict(*batch.inputs)
            yield [t.numpy() for t in batch.inputs], [t.numpy() for t in outputs]


def compare_outputs(what: str, pairs: Pairs, answer: Answer) -> Replay:
    """Return the largest difference from the expected outputs; infinite for NaN or other shapes."""
    worst, samples = 0.0, 0
    for inputs, expected in pairs:
        samples += len(inputs[0])
        for output, target in zip(answer(inputs), expected, strict=True):
            if output.shape != target.shape or output.dtype != target.dtype:
                worst = float("inf")
                continue
            with np.errstate(invalid="ignore"):
                difference = np.abs(output.astype(np.float64) - target.astype(np.float64))
            same = np.equal(output, target)  # infinities too
            difference = np.where(np.isnan(difference), np.inf, difference)
            worst = max(worst, float(np.where(same, 0, difference).max(initial=0.0)))
    return Replay(what=what, samples=samples, largest_difference=worst)


def verify(
    path: Path | str,
    *,
    sha256: str | None = None,
    evidence: Callable[[], Evidence | None] = lambda: None,
    trusted: bool = False,
) -> Proof:
    """Verify an artifact's directory, or a ``.mar`` without its directory.

    A single ``.mar`` is checked only against its own record: compare its SHA-256 with a trusted
    one. An archive is started only if its code is the handler that this version ships.

    Args:
        path: the directory or the file.
        sha256: expected SHA-256 of the deployed file, or digest of the artifact, if known.
        evidence: loads the run's other artifacts and its validation split. It is called after
            every hash was checked, as it may run the pipeline's code.
        trusted: start an archive of native code even without `sha256`.

    Raises:
        ArtifactInvalid: a file or member does not match; the message names it.
        StageFailed: the served model does not become ready.
    """
    mar = path = Path(path)
    run_evidence: Evidence | None = None
    if path.is_file():
        members, origin = check_bare_mar(path, sha256)
        digest = sha256_of(path)
        advice = "as expected" if sha256 else "compare it with the one that you were given"
        lines = (f"{path.name}: sha256 {digest}; {advice}", *_member_lines(members, origin))
        proof = Proof(kind=TorchServeArchive.kind, sha256=digest, proven=lines)
    else:
        artifact = Artifact.from_directory(path)
        refuse_wrong_artifact_hash(artifact, sha256)
        if not isinstance(artifact, TorchServeArchive):
            artifact.verify()
            return _proof_of_files(artifact)
        mar = artifact.payload_path
        members, origin = artifact.check()
        proof = _proof_of_files(artifact).with_lines(*_member_lines(members, origin))
        run_evidence = evidence()
    proof = prove_chain(proof, origin, run_evidence, str(mar))
    if origin.artifact.kind == "aot" and not trusted and sha256 is None:
        return proof.lacking(
            "that it answers: its model is native code, which cannot be inspected, so it was not "
            "started; give the archive's sha256, from a source that you trust, with --sha256, or "
            "--replay for a run that you trust"
        )
    return prove_answers(proof, mar, members, origin, run_evidence)


def _proof_of_files(artifact: Artifact) -> Proof:
    files = artifact.manifest.files
    lines = [f"{artifact.kind} artifact, digest {artifact.digest}"]
    for name, file in files.items():
        lines.append(f"{name}: {file.bytes} bytes, sha256 {file.sha256}, as sealed")
    for step in artifact.manifest.lineage:
        read = ", ".join(f"{role} {digest}" for role, digest in step.inputs.items())
        lines.append(f"{step.stage} read {read or 'nothing'}")
    payload = files[artifact.payload_name].sha256
    return Proof(kind=artifact.kind, sha256=payload, digest=artifact.digest, proven=tuple(lines))


def _member_lines(members: Mapping[str, bytes], origin: Provenance) -> list[str]:
    packed = origin.artifact
    traced = f", traced from eager artifact {packed.traced_from}" if packed.traced_from else ""
    return [
        f"{len(members)} members have safe names; {len(origin.members)} hash to what "
        f"{PROVENANCE} records",
        f"{packed.payload} is the payload of {packed.kind} artifact {packed.digest}{traced}",
    ]
