"""What is proven of an archive: that its origin is here as sealed, and that it still answers."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, Unavailable
from serve.torchserve.artifact import PROBE
from serve.torchserve.mar_file import CONFIG
from serve.worker.wire import from_npz

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.data.splits import Splits
    from serve.packaging.provenance import Provenance
    from serve.worker.tensors import Array

    Answer = Callable[[Sequence[Array]], tuple[Array, ...]]
    Pairs = Iterable[tuple[Sequence[Array], Sequence[Array]]]


class Replay(Settings):
    """Answers held against those that were recorded, or that the packaged artifact gives."""

    what: str
    samples: int
    largest_difference: float


class Proof(Settings):
    """What was proven of an artifact."""

    version: Literal[1] = 1
    kind: str
    sha256: str
    """Of the file to deploy."""
    digest: str | None = None
    """Of the artifact's manifest; None of a bare archive."""
    anchors: tuple[str, ...] = ()
    """What outside the artifact names its digest or its file's hash."""
    served_by: str | None = None
    """What answered; None where nothing was started."""
    replays: tuple[Replay, ...] = ()
    proven: tuple[str, ...]
    """Everything that was proven, in plain lines."""
    unproven: tuple[str, ...] = ()
    """What could not be, and why."""

    def with_lines(self, *lines: str, **changed: Any) -> Proof:
        """Return the proof with more lines."""
        return self.model_copy(update={"proven": (*self.proven, *lines), **changed})

    def lacking(self, line: str) -> Proof:
        """Return the proof with something that it does not show."""
        return self.model_copy(update={"unproven": (*self.unproven, line)})

    def summary_lines(self) -> Iterator[str]:
        """Yield what was proven and what not, for people."""
        yield from (f"proven: {line}" for line in self.proven)
        yield from (f"not proven: {line}" for line in self.unproven)


@dataclass(frozen=True)
class Evidence:
    """What lies around an archive where it was made."""

    artifacts: Mapping[str, Artifact]
    """The run's artifacts by digest."""
    source: Mapping[str, Any]
    """What decides the imported model now: the hash of its checkpoint, and of its code."""
    data: Splits | None
    """The data that the run had."""
    missing: str = ""
    """Why there are no data."""


def prove_chain(proof: Proof, origin: Provenance, evidence: Evidence | None, where: str) -> Proof:
    """Return the proof with what is known of each artifact back to the source.

    Raises:
        ArtifactInvalid: an ancestor is not as it was sealed, or the checkpoint is another one.
    """
    history = origin.history
    if history is None:
        return proof.lacking("the stages' artifacts: the archive was packed outside a run")
    names = {stage.digest: stage.name for stage in history.stages}
    chain = {history.source_digest: "source"} | names
    road = " → ".join(f"{name} {digest[:12]}" for digest, name in chain.items())
    proof = proof.with_lines(f"each stage read what the one before it made: {road}")
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
                f"{where}: the {part} of the model as it came in was {recorded}, and is now "
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
    """Return the proof with what the served archive answered.

    Raises:
        ArtifactInvalid: an answer differs from the recorded one.
    """
    import yaml

    settings = yaml.safe_load(members[CONFIG])["handler"]
    names = [output.name for output in origin.signature.outputs]
    with answering(mar, members, origin, int(settings["max_rows"])) as (answer, served_by):
        probe = from_npz(members[PROBE])
        given = [probe[spec.name] for spec in origin.signature.inputs]
        pairs: Pairs = [(given, [probe[name] for name in names])]
        replays = [replayed("the recorded probe", pairs, answer)]
        packaged = evidence.artifacts.get(origin.artifact.origin) if evidence else None
        if packaged is not None and evidence is not None and evidence.data is not None:
            found = validation(packaged, evidence.data, int(settings["max_rows"]))
            replays.append(replayed("the validation split", found, answer))
    for replay in replays:
        if not replay.largest_difference <= float(settings["probe_atol"]):
            raise ArtifactInvalid(
                f"{mar}: {PROBE if replay is replays[0] else replay.what}: the served answers "
                f"differ by {replay.largest_difference:.3g}"
            )
    lines = [
        f"{served_by} answered {replay.what} ({replay.samples} samples); largest difference "
        f"{replay.largest_difference:.3g}"
        for replay in replays
    ]
    proof = proof.with_lines(*lines, served_by=served_by, replays=tuple(replays))
    if len(replays) > 1:
        return proof
    why = evidence.missing if evidence else "no run's results lie around it"
    return proof.lacking(f"the validation split: {why or 'the packaged artifact is not here'}")


@contextmanager
def answering(
    mar: Path, members: Mapping[str, bytes], origin: Provenance, max_rows: int
) -> Iterator[tuple[Answer, str]]:
    """Give what answers, and its name: TorchServe, or the handler in a process of its own."""
    from serve.client.client import Client
    from serve.torchserve.handler_runner import Harness
    from serve.torchserve.process import TorchServe, find_java, find_torchserve

    try:
        find_java()
        find_torchserve()
    except Unavailable as missing:
        with Harness(members, origin.signature) as harness:
            yield harness.predict, f"the archive's handler, without TorchServe ({missing}),"
        return
    with (
        TorchServe(mar) as server,
        Client(
            server.url,
            server.model_name,
            origin.signature,
            token=server.token,
            max_rows=max_rows,
        ) as client,
    ):
        yield client.predict, "TorchServe"


def validation(packaged: Artifact, data: Splits, max_rows: int) -> Pairs:
    """Yield the validation split's inputs, with what the packaged artifact answers to them."""
    fixed = packaged.signature.batch_axis is None
    rows = packaged.signature.inputs[0].shape[:1][0] if fixed else min(max_rows, data.batch_size)
    with packaged.open() as predict:
        for batch in data.batches("val", batch_size=int(rows)):
            if fixed and len(batch.inputs[0]) != rows:
                continue  # the last, smaller batch
            outputs = predict(*batch.inputs)
            yield [t.numpy() for t in batch.inputs], [t.numpy() for t in outputs]


def replayed(what: str, pairs: Pairs, answer: Answer) -> Replay:
    """Return how far answers are from those expected; infinitely far for NaN or other shapes."""
    import numpy as np

    worst, samples = 0.0, 0
    for inputs, expected in pairs:
        samples += len(inputs[0])
        for got, wanted in zip(answer(inputs), expected, strict=True):
            if got.shape != wanted.shape or got.dtype != wanted.dtype:
                worst = float("inf")
                continue
            with np.errstate(invalid="ignore"):
                difference = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
            same = np.equal(got, wanted)  # infinities too
            apart = np.where(np.isnan(difference), np.inf, difference)
            worst = max(worst, float(np.where(same, 0, apart).max(initial=0.0)))
    return Replay(what=what, samples=samples, largest_difference=worst)
