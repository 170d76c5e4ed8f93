"""Write MODEL_CARD.md: what was recorded and measured of a model, and what was not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from compress.core.verdict import History, PastStage, Verdict
    from serve.packaging.provenance import Provenance

MODEL_CARD = "MODEL_CARD.md"
NOT_MEASURED = """\
Latency is not written here: it belongs to a machine, and the run's report has it. Nothing was
measured of the model's behaviour on data unlike the validation split, on groups within it, or under
attack. What the model is meant for, where its data come from, and under which licence it may be
used, is not known to the tool that wrote this card."""


def model_card(model_name: str, record: Provenance, bytes_served: int) -> str:
    """Return the model card's Markdown, of recorded and measured facts only."""
    artifact, signature = record.artifact, record.signature
    about = [("format", artifact.kind), ("file", f"`{artifact.payload}`, {bytes_served} bytes")]
    about += [("sha256", f"`{artifact.sha256}`"), ("artifact", f"`{artifact.origin}`")]
    about += [(f"input `{i.name}`", f"{i.dtype} {list(i.shape)}") for i in signature.inputs]
    about += [("outputs", ", ".join(f"`{output.name}`" for output in signature.outputs))]
    if record.history:
        made = _history_section(record.history)
    else:
        steps = record.lineage
        rows = [(s.stage, f"`{s.inputs.get('input')}`", f"`{_json(s.settings)}`") for s in steps]
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
    source = [(f"{name} of the input model", f"`{v}`") for name, v in history.source.items() if v]
    data = f"`{history.data}`" if history.data else "none"
    facts = [("pipeline", history.pipeline), ("seed", history.seed), ("data", data), *source]
    columns = ("stage", "kind", "metric", "bytes", "weights", "multiply-accumulates", "artifact")
    verdicts = [
        (stage.name, verdict.rule, _measured(verdict), verdict.against or "–")
        for stage in history.stages
        for verdict in stage.verdicts
    ]
    return [
        _table(("what", "value"), [*facts, *history.versions.items()]),
        _table(columns, map(_row, history.stages)),
        *(f"Settings of `{stage.name}`: `{_json(stage.settings)}`" for stage in history.stages),
        "## Requirements (gates)",
        _table(("stage", "rule", "measured", "compared with"), verdicts),
    ]


def _row(stage: PastStage) -> tuple[Any, ...]:
    metric = stage.metric
    shown = f"{metric['name']} {metric['value']:.4f} on {metric['split']}" if metric else "–"
    counts = ["–" if n is None else n for n in (stage.parameters, stage.macs)]
    return (stage.name, stage.kind, shown, stage.bytes, *counts, f"`{stage.digest}`")


def _measured(verdict: Verdict) -> str:
    return "kept" if verdict.value is None else f"{verdict.value:.6g}"


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [list(columns), ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
