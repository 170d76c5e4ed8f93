"""Write MODEL_CARD.md: what was recorded and measured of a model, and what was not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from compress.common.printable import markdown_code, markdown_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from compress.core.verdict import History, PastStage, Verdict
    from compress.serve.packaging.provenance import Provenance

MODEL_CARD = "MODEL_CARD.md"
NOT_MEASURED = """\
Latency is not written here: it belongs to a machine, and the run's report has it. Nothing was
measured of the model's behaviour on data unlike the validation split, on groups within it, or under
attack. What the model is meant for, where its data come from, and under which licence it may be
used, is not known to the tool that wrote this card."""


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
    verdicts = [
        (
            markdown_text(stage.name),
            markdown_text(verdict.rule),
            _measured(verdict),
            markdown_text(verdict.against or "–"),
        )
        for stage in history.stages
        for verdict in stage.verdicts
    ]
    return [
        _table(("what", "value"), facts),
        _table(columns, map(_row, history.stages)),
        *(
            f"Settings of {markdown_code(stage.name)}: {_settings(stage.settings)}"
            for stage in history.stages
        ),
        "## Requirements (gates)",
        _table(("stage", "rule", "measured", "compared with"), verdicts),
    ]


def _row(stage: PastStage) -> tuple[Any, ...]:
    metric = stage.metric
    shown = f"{metric['name']} {metric['value']:.4f} on {metric['split']}" if metric else "–"
    texts = map(markdown_text, (stage.name, stage.kind, shown))
    counts = ["–" if n is None else n for n in (stage.parameters, stage.macs)]
    return (*texts, stage.bytes, *counts, markdown_code(stage.digest))


def _measured(verdict: Verdict) -> str:
    return "kept" if verdict.value is None else f"{verdict.value:.6g}"


def _settings(settings: dict[str, Any]) -> str:
    return markdown_code(json.dumps(settings, sort_keys=True))


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
