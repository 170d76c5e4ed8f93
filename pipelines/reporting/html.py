"""Renders the page of a run: everything on it is in report.json, lock.json or the artifacts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from compress.common.errors import ArtifactInvalid
from pipelines.reporting.page_sections import (
    latency_spreads,
    layer_sensitivities,
    layer_sizes,
    lineage_paths,
    proof_chain,
    source_hashes,
    trainings_of,
)
from pipelines.reporting.stage_rows import (
    SHOWN_FIRST,
    build_rows,
    count_by_status,
    deployable_rows,
    failure_reasons,
    fidelity_of,
    headline,
    pareto_fronts,
    sameness_of,
    speed_in_words,
)
from pipelines.results.explanation import Explanations
from pipelines.results.schema import REPORT, Report
from pipelines.store.local import keep_idle
from pipelines.system.jsonl_log import LOG
from pipelines.system.templates import render_template

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


SHOWN_ELSEWHERE = ("history",)
"""Facts that the page already shows in a plot and a table."""
MODEL_KEYS = ("huggingface", "timm", "factory", "file")
"""Settings of `model`, of which the first that is given says what was compressed."""
MAX_CHARACTERS = 40_000
"""Characters of facts and settings on the page; for more, the page names the JSON file."""


def render(report: Report, out: Path | None = None) -> str:
    """Render a run's report as one self-contained page.

    `out` is the folder of the results, whose artifacts give layer sizes and digests; without it the
    page says that they are missing.
    """
    from compress.core.gates import rule_in_words, value_in_words

    lock: Any = report.lock
    rows = build_rows(report)
    fronts = pareto_fronts(report, rows)
    ends = deployable_rows(rows, fronts, report)
    sensitivities, not_shown = layer_sensitivities(rows)
    metric = ((lock.get("settings") or {}).get("metric") or {}).get("name", "metric")
    model = (lock.get("settings") or {}).get("model") or {}
    settings = json.dumps(lock.get("settings"), indent=1, sort_keys=True)
    artifacts = [(row, row.report.artifact) for row in rows if row.report]
    facts, left = [], MAX_CHARACTERS
    for row, artifact in artifacts:
        own = {n: value for n, value in artifact.facts.items() if n not in SHOWN_ELSEWHERE}
        if own:
            text = json.dumps(own, indent=1)
            if len(text) > left:
                text = f"{', '.join(own)}: see report.json"
            left -= len(text)
            facts.append((row.name, text))
    return render_template(
        "report.html.jinja",
        report=report,
        lock=lock,
        metric=metric,
        model=next((model[key] for key in MODEL_KEYS if model.get(key)), ""),
        rows=rows,
        status_counts=count_by_status(rows),
        headline=headline(report),
        speed_in_words=speed_in_words,
        failures=failure_reasons(rows),
        served=[row.name for row, artifact in artifacts if artifact.kind == "torchserve"],
        simulated=[
            row.name
            for row, artifact in artifacts
            if artifact.kind == "graph" and row.stage != "export_program"
        ],
        fronts=fronts,
        deployable=ends[:SHOWN_FIRST],
        also_deployable=ends[SHOWN_FIRST:],
        trainings=trainings_of(rows, metric),
        sizes=layer_sizes(rows, out),
        sensitivities=sensitivities,
        not_shown=not_shown,
        has_sensitivity_page=out is not None and (out / "sensitivity.html").is_file(),
        spreads=latency_spreads(rows),
        explanations=None if out is None else Explanations.read(out, report),
        source=source_hashes(report),
        links=proof_chain(report, rows, out),
        lineages=lineage_paths(rows, ends[:SHOWN_FIRST]),
        facts=facts,
        settings=settings if len(settings) <= MAX_CHARACTERS else "see lock.json",
        rule_in_words=rule_in_words,
        value_in_words=value_in_words,
        fidelity_of=fidelity_of,
        sameness_of=sameness_of,
    )


def rerender_report(out: Path, announce: Callable[[str], None]) -> Report:
    """Read a run's report, and write its page again if no run is using the directory.

    Raises:
        ArtifactInvalid: there is no report, as the last run there was killed or is still at work.
    """
    with keep_idle(out) as nobody_works:
        if (out / ".store").is_dir() and not (out / REPORT).exists():
            if not nobody_works:
                raise ArtifactInvalid(f"{out}: a run is at work; it writes its report when it ends")
            raise ArtifactInvalid(
                f"{out}: the last run ended before it could write a report; {out / LOG} says how "
                "far it came, and running it again goes on"
            )
        report = Report.read(out)
        if not nobody_works:
            announce(f"{out}: a run is at work; it writes the page when it ends")
            return report
        try:
            report.write(out, render(report, out))
        except OSError as error:
            announce(f"{out}: the page is not written anew ({error.strerror or error})")
    return report
