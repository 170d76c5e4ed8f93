"""The provenance record of a TorchServe archive, and its model card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from compress.artifacts.artifact import FileDigest, Step
from compress.common.atomic_files import sha256_of
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.printable import markdown_code, markdown_text
from compress.common.sealed_json import dump_sealed, load_sealed, parse_settings
from compress.common.signature import Signature
from compress.core.verdict import History

PROVENANCE = "provenance.json"
MODEL_CARD = "MODEL_CARD.md"
NOT_MEASURED = """\
Latency is not written here: it belongs to a machine, and the run's report has it. Nothing was
measured of the model's behaviour on data unlike the validation split, on groups within it, or under
attack. What the model is meant for, where its data come from, and under which licence it may be
used, is not known to the tool that wrote this card."""


class Packaged(Settings):
    """The artifact packed in an archive."""

    kind: str
    digest: str
    """SHA-256 of its manifest."""
    payload: str
    """Name of its deployed file, and of the archive's member with it."""
    sha256: str
    traced_from: str = ""
    """Digest of the eager artifact that it was traced from, whose code is not packed."""

    @property
    def origin(self) -> str:
        """Digest of the packaging stage's input artifact."""
        return self.traced_from or self.digest


class Provenance(Settings):
    """The archive member `provenance.json`."""

    version: Literal[2] = 2
    signature: Signature
    artifact: Packaged
    lineage: tuple[Step, ...]
    history: History | None
    """The run's record of its stages; None if the model was packed outside a run."""
    members: dict[str, FileDigest]
    """Every other member of the archive."""

    def sealed(self) -> bytes:
        """Serialize the record with its digest."""
        return dump_sealed(self.model_dump(mode="json"))

    @classmethod
    def read(cls, data: bytes, where: str) -> Provenance:
        """Parse a record; ArtifactInvalid where it is none, or was changed after sealing."""
        return parse_settings(cls, data, f"{where}: member {PROVENANCE}", load_sealed)


def refuse_broken_chain(record: Provenance, where: str) -> None:
    """Raise ArtifactInvalid where a recorded stage did not read the output of the one before it."""
    if record.history is None:
        return
    stages = record.history.stages
    outputs = {"source": record.history.source_digest, **{s.name: s.digest for s in stages}}
    for stage, step in zip(stages, record.lineage[-len(stages) :], strict=False):
        if (stage.stage, outputs.get(stage.input)) != (step.stage, step.inputs.get("input")):
            raise ArtifactInvalid(
                f"{where}: {PROVENANCE}: stage {stage.name} is recorded as {stage.stage} of "
                f"{outputs.get(stage.input)}, and its lineage says {step.stage} of "
                f"{step.inputs.get('input')}"
            )
    last = stages[-1].name if stages else "source"
    if outputs[last] != record.artifact.origin:
        raise ArtifactInvalid(
            f"{where}: {PROVENANCE}: the last stage, {last}, made {outputs[last]}, and the "
            f"packaged artifact is {record.artifact.origin}"
        )


def digest_of(content: bytes | Path) -> FileDigest:
    """Return the size and hash of bytes or of a file."""
    if isinstance(content, Path):
        return FileDigest(sha256=sha256_of(content), bytes=content.stat().st_size)
    return FileDigest(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def model_card(model_name: str, record: Provenance, bytes_served: int) -> str:
    """Return the model card's Markdown, of recorded and measured facts only."""
    artifact, signature = record.artifact, record.signature
    about = [
        ("format", markdown_text(artifact.kind)),
        ("file", f"{markdown_code(artifact.payload)}, {bytes_served} bytes"),
        ("sha256", markdown_code(artifact.sha256)),
        ("artifact", markdown_code(artifact.origin)),
    ]
    for tensor in signature.inputs:
        shape = markdown_text(f"{tensor.dtype} {list(tensor.shape)}")
        about.append((f"input {markdown_code(tensor.name)}", shape))
    about += [("outputs", ", ".join(markdown_code(output.name) for output in signature.outputs))]
    if record.history:
        made = _history_section(record.history)
    else:
        rows = [
            (markdown_text(s.stage), markdown_code(s.inputs.get("input")), _settings(s.settings))
            for s in record.lineage
        ]
        made = [
            "It was packed outside a run, so what was measured of each stage is not known here.",
            _table(("stage", "read artifact", "settings"), rows),
        ]
    parts = [
        f"# {model_name}",
        "Written by the tool that packed the model, from what it recorded and measured.",
        "## The model",
        _table(("what", "value"), about),
        "## How it was made",
        *made,
        "## What was not measured",
        NOT_MEASURED,
    ]
    return "\n\n".join(parts) + "\n"


def _history_section(history: History) -> list[str]:
    facts = [("pipeline", markdown_text(history.pipeline)), ("seed", history.seed)]
    facts.append(("data", markdown_code(history.data) if history.data else "none"))
    for name, value in history.source.items():
        if value:
            facts.append((f"{markdown_text(name)} of the input model", markdown_code(value)))
    facts += [(markdown_text(name), markdown_text(v)) for name, v in history.versions.items()]
    columns = ("stage", "kind", "metric", "bytes", "weights", "multiply-accumulates", "artifact")
    stages, verdicts, bounds = [], [], []
    for stage in history.stages:
        if stage.certificate:
            bounds.append(f"{markdown_text(stage.name)}: {markdown_text(stage.certificate)}")
        metric = stage.metric
        shown = f"{metric['name']} {metric['value']:.4f} on {metric['split']}" if metric else "–"
        texts = map(markdown_text, (stage.name, stage.kind, shown))
        counts = ["–" if n is None else n for n in (stage.parameters, stage.macs)]
        stages.append((*texts, stage.bytes, *counts, markdown_code(stage.digest)))
        for verdict in stage.verdicts:
            measured = "kept" if verdict.value is None else f"{verdict.value:.6g}"
            rule = markdown_text(verdict.rule + verdict.located)
            against = markdown_text(verdict.against or "–")
            verdicts.append((markdown_text(stage.name), rule, measured, against))
            if verdict.bound:
                promise = markdown_text(verdict.bound.statement())
                bounds.append(f"{markdown_text(stage.name)}, {rule}: {promise}")
    return [
        _table(("what", "value"), facts),
        _table(columns, stages),
        *(
            f"Settings of {markdown_code(stage.name)}: {_settings(stage.settings)}"
            for stage in history.stages
        ),
        "## Requirements (gates)",
        _table(("stage", "rule", "measured", "compared with"), verdicts),
        *bounds,
    ]


def _settings(settings: dict[str, Any]) -> str:
    return markdown_code(json.dumps(settings, sort_keys=True))


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
