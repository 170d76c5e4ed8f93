"""The page of a run: everything on it is in report.json, lock.json or the sealed artifacts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipelines.reporting.html_page import rendered
from pipelines.reporting.latency_spread import spreads_of
from pipelines.reporting.layer_sizes import sensitivities_of, sizes_of
from pipelines.reporting.provenance import links_of, roads_of, source_of
from pipelines.reporting.quantization_summary import fidelity_of, sameness_of
from pipelines.reporting.stage_rows import (
    SHOWN_FIRST,
    counted,
    fronts_of,
    hindrances,
    rows_of,
    shipped,
)
from pipelines.reporting.training_curves import trainings_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipelines.reporting.stage_rows import Row
    from pipelines.results.schema import Report

DRAWN_ELSEWHERE = ("history",)
"""Facts that are in a plot and a table already."""
WRITTEN_OUT = 40_000
"""Letters of facts and settings that are written out; beyond, the page names the file."""


def render(report: Report, out: Path | None = None) -> str:
    """Render a run's report as one self-contained page.

    Args:
        report: the report.
        out: folder of the results, whose artifacts give layer sizes and digests; without it the
            page says that they are not there.
    """
    from compress.core.gates import rule_in_words, value_in_words

    lock: Any = report.lock
    rows = rows_of(report)
    fronts = fronts_of(report, rows)
    ends = shipped(rows, fronts, report.baseline_name)
    sensitivities, crowded_out = sensitivities_of(rows)
    metric = ((lock.get("settings") or {}).get("metric") or {}).get("name", "metric")
    return rendered(
        "report.html.jinja",
        report=report,
        lock=lock,
        metric=metric,
        rows=rows,
        counted=counted(rows),
        hindrances=hindrances(rows),
        served=_named(rows, "torchserve"),
        simulated=_named([r for r in rows if r.stage != "export_program"], "graph"),
        fronts=fronts,
        shipped=ends[:SHOWN_FIRST],
        also_shipped=ends[SHOWN_FIRST:],
        trainings=trainings_of(rows, metric),
        sizes=sizes_of(rows, out),
        sensitivities=sensitivities,
        crowded_out=crowded_out,
        measured_apart=out is not None and (out / "sensitivity.html").is_file(),
        spreads=spreads_of(rows),
        source=source_of(report),
        links=links_of(report, rows, out),
        roads=roads_of(rows, ends[:SHOWN_FIRST]),
        facts=_facts(rows),
        settings=_written(lock.get("settings")),
        rule_in_words=rule_in_words,
        value_in_words=value_in_words,
        fidelity_of=fidelity_of,
        sameness_of=sameness_of,
    )


def _named(rows: Sequence[Row], kind: str) -> list[str]:
    return [row.name for row in rows if row.report and row.report.artifact.kind == kind]


def _facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the facts of each stage as JSON; the names alone where there is no room for it."""
    told, left = [], WRITTEN_OUT
    for row in rows:
        facts = dict(row.report.artifact.facts) if row.report else {}
        facts = {name: value for name, value in facts.items() if name not in DRAWN_ELSEWHERE}
        if facts:
            text = json.dumps(facts, indent=1)
            if len(text) > left:
                text = f"{', '.join(facts)}: see report.json"
            left -= len(text)
            told.append((row.name, text))
    return told


def _written(settings: Any) -> str:
    text = json.dumps(settings, indent=1, sort_keys=True)
    return text if len(text) <= WRITTEN_OUT else "see lock.json"
