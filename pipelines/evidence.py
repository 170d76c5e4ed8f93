"""What lies around an archive in the results of a run, for `compress verify`."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.core.artifact import Artifact
from compress.core.errors import ArtifactInvalid, CompressError, PipelineInvalid
from compress.core.files import write_atomically
from pipelines import catalog  # noqa: F401 - importing it makes every kind known
from pipelines.pipeline import Pipeline
from pipelines.proof_page import as_text
from serve.archive import TorchServeArchive
from serve.proof import Evidence, Proof
from serve.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from compress.core.data import Splits


def prove(path: Path, sha256: str | None, report: Path | None) -> Proof:
    """Return what was proven of an artifact, and write it where that is asked for.

    Args:
        path: the artifact's directory, or a bare archive.
        sha256: what its file must hash to.
        report: file to write: a page where it ends in `.html`, text where in `.md`, else JSON.

    Raises:
        CompressError: something does not match, or the report cannot lie there; the message says.
    """
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        found = "a directory is there" if report.is_dir() else f"{report.parent} is no directory"
        raise PipelineInvalid(f"--report {report}: cannot be written, {found}")
    proof = verify(path, sha256=sha256, evidence=partial(evidence_of, path))
    if report is not None:
        write_atomically(report, as_text(proof, path.name, report.suffix))
    return proof


def evidence_of(path: Path) -> Evidence | None:
    """Return what a run left around an archive; None where none did.

    The pipeline's data are loaded again: its own code runs, as in the run.
    """
    from pipelines.inputs import settle, source_parts  # imports torch, which few proofs need

    folder = path.absolute().parent
    lock = folder.parent / "lock.json"
    if path.is_file() or folder.name != "artifacts" or not lock.is_file():
        return None
    if not isinstance(Artifact.at(path), TorchServeArchive):
        return None
    artifacts = {}
    for each in folder.iterdir():
        with suppress(ArtifactInvalid):  # it counts as missing
            artifacts[Artifact.at(each).digest] = Artifact.at(each)
    source: dict[str, Any] = {}
    data: Splits | None = None
    missing = ""
    try:
        locked = json.loads(lock.read_text(encoding="utf-8"))
        pipeline, data, _ = settle(Pipeline.from_yaml(locked["file"]))
        source = source_parts(pipeline)
        if data is None or "val" not in data.datasets:
            data, missing = None, "the pipeline has none"
        elif data.fingerprint() != locked["data"]:
            data, missing = None, "the data are not those of the run any more"
    except (CompressError, OSError, ValueError, KeyError) as error:
        missing = f"{type(error).__name__}: {error}"
    return Evidence(artifacts=artifacts, source=source, data=data, missing=missing)
