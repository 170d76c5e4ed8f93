"""Renders the page of a run: everything on it is in report.json, lock.json or the artifacts."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid
from compress.core.gates import rule_in_words, value_in_words
from compress.pipelines.reporting import stage_rows
from compress.pipelines.reporting.svg_plots import MAX_DRAWN_POINTS, Plot, axis_for, line_plot
from compress.pipelines.results.explanation import Explanations
from compress.pipelines.results.schema import REPORT, Report
from compress.pipelines.store.local import keep_idle
from compress.pipelines.system.jsonl_log import LOG
from compress.pipelines.system.templates import readable_bytes, render_template

if TYPE_CHECKING:
    from compress.pipelines.reporting.stage_rows import StageRow

MODEL_KEYS = ("huggingface", "timm", "factory", "file")
"""Settings of `model`, of which the first that is given says what was compressed."""
MAX_CHARACTERS = 40_000  # of facts and settings on the page; for more, it names the JSON file
MAX_SIZE_ROWS, MAX_SENSITIVITY_ROWS = 15, 12  # rows of the size table and of each sensitivity table
MAX_COLUMNS, MAX_TABLES = 6, 6  # stages in the size table, sensitivity tables on the page
STRIP_WIDTH = 240  # width of a strip, in units of its SVG view box
MAX_DRAWN_TRAININGS = 12  # with plots, to keep the page small; the table lists all of them


def render(report: Report, out: Path | None = None) -> str:
    """Render a run's report as one page; with `out`, its folder, also layer sizes and digests."""
    lock: Any = report.lock
    rows = stage_rows.build_rows(report)
    fronts = stage_rows.pareto_fronts(report, rows)
    ends = stage_rows.deployable_rows(rows, fronts, report)
    sensitivities, not_shown = layer_sensitivities(rows)
    metric = ((lock.get("settings") or {}).get("metric") or {}).get("name", "metric")
    model = (lock.get("settings") or {}).get("model") or {}
    settings = json.dumps(lock.get("settings"), indent=1, sort_keys=True)
    artifacts = [(row, row.report.artifact) for row in rows if row.report]
    facts, left = [], MAX_CHARACTERS
    for row, artifact in artifacts:
        # The history of a training is shown in a plot and a table.
        own = {n: value for n, value in artifact.facts.items() if n != "history"}
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
        status_counts=stage_rows.count_by_status(rows),
        headline=stage_rows.headline(report),
        speed_in_words=stage_rows.speed_in_words,
        failures=stage_rows.failure_reasons(rows),
        served=[row.name for row, artifact in artifacts if artifact.kind == "torchserve"],
        simulated=[
            row.name
            for row, artifact in artifacts
            if artifact.kind == "graph" and row.stage != "export_program"
        ],
        fronts=fronts,
        deployable=ends[: stage_rows.SHOWN_FIRST],
        also_deployable=ends[stage_rows.SHOWN_FIRST :],
        trainings=trainings_of(rows, metric),
        sizes=layer_sizes(rows, out),
        sensitivities=sensitivities,
        not_shown=not_shown,
        has_sensitivity_page=out is not None and (out / "sensitivity.html").is_file(),
        spreads=latency_spreads(rows),
        explanations=None if out is None else Explanations.read(out, report),
        source=source_hashes(report),
        links=proof_chain(report, rows, out),
        lineages=lineage_paths(rows, ends[: stage_rows.SHOWN_FIRST]),
        facts=facts,
        settings=settings if len(settings) <= MAX_CHARACTERS else "see lock.json",
        rule_in_words=rule_in_words,
        value_in_words=value_in_words,
        fidelity_of=stage_rows.fidelity_of,
        sameness_of=stage_rows.sameness_of,
    )


def rerender_report(out: Path, announce: Callable[[str], None]) -> Report:
    """Read a run's report, and write its page again if no run is using the directory."""
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


@dataclass(frozen=True)
class Cell:
    """A figure as text, and the length of its bar as a share of the longest."""

    text: str
    share: float = 0.0


@dataclass(frozen=True)
class LayerTable:
    """A table with a row for each layer."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    left_out: str = ""
    """Which layers or stages are not in the table, as a sentence."""


def layer_sizes(rows: Sequence[StageRow], out: Path | None) -> LayerTable | None:
    """Compare bytes of weights by layer of eager artifacts; equal stages share a column."""
    names: dict[str, list[str]] = {}
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        if out is None or row.report is None or row.report.artifact.kind != "eager":
            continue
        artifact = row.report.artifact
        names.setdefault(artifact.sha256, []).append(row.name)
        if artifact.sha256 not in found:
            found[artifact.sha256] = _bytes_by_layer(out / artifact.path / artifact.file)
    columns = [(" = ".join(names[key]), layers) for key, layers in found.items() if layers]
    if not columns:
        return None
    shown = columns[:MAX_COLUMNS]
    heaviest: dict[str, int] = {}
    for _, layers in shown:
        heaviest |= {n: max(size, heaviest.get(n, 0)) for n, size in layers.items()}
    largest = set(sorted(heaviest, key=lambda n: -heaviest[n])[:MAX_SIZE_ROWS])
    ordered = [name for name in heaviest if name in largest]
    most = max(heaviest.values()) or 1
    table = []
    for name in ordered:
        sizes = [layers.get(name) for _, layers in shown]
        cells = (Cell("gone") if s is None else Cell(readable_bytes(s), s / most) for s in sizes)
        table.append((name, tuple(cells)))
    others = len(heaviest) - len(ordered)
    if others:
        sums = [sum(size for n, size in of.items() if n not in largest) for _, of in shown]
        table.append((f"{others} smaller layers", tuple(Cell(readable_bytes(s)) for s in sums)))
    sums = [sum(of.values()) for _, of in shown]
    table.append(("all layers", tuple(Cell(readable_bytes(s)) for s in sums)))
    left = ", ".join(name for name, _ in columns[MAX_COLUMNS:])
    return LayerTable(
        "Bytes of weights and buffers by layer",
        tuple(name for name, _ in shown),
        tuple(table),
        f"Not shown side by side: {left}." if left else "",
    )


def _bytes_by_layer(file: Path) -> dict[str, int]:
    try:
        with file.open("rb") as opened:
            # 8 bytes with the length of the JSON header, which has each tensor's place in the file.
            (length,) = struct.unpack("<Q", opened.read(8))
            header: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, struct.error, ValueError):
        return {}
    found: dict[str, int] = {}
    for tensor, entry in header.items():
        if tensor != "__metadata__":
            start, end = entry["data_offsets"]
            layer = tensor.rpartition(".")[0] or tensor
            found[layer] = found.get(layer, 0) + end - start
    return found


def layer_sensitivities(rows: Sequence[StageRow]) -> tuple[list[LayerTable], list[str]]:
    """Return the tables of measured sensitivities, and the names of stages left out for space."""
    found = [(row.name, table) for row in rows if row.report for table in _measured(row)]
    left = list(dict.fromkeys(name for name, _ in found[MAX_TABLES:]))
    return [table for _, table in found[:MAX_TABLES]], left


def _measured(row: StageRow) -> Iterator[LayerTable]:
    """Yield a table for each per-layer measurement in a stage's facts, most sensitive first."""
    assert row.report
    facts: Mapping[str, Any] = row.report.artifact.facts
    layers = (facts.get("fidelity") or {}).get("layers") or []
    if layers:
        sqnr = {x["module"]: (x["own_sqnr_db"], x["sqnr_db"]) for x in layers}
        title = f"{row.name}: SQNR in dB where a layer is quantized (lower is more sensitive)"
        yield _table(title, ("it alone", "with all before it"), sqnr, lowest_first=True)
    layers = (facts.get("mixed") or {}).get("layers") or []
    if layers:
        by_layer = {x["module"]: (x["sensitivity"], x["format"]) for x in layers}
        title = f"{row.name}: sensitivity of each layer, and the format it was given"
        yield _table(title, ("sensitivity as the stage's settings ask", "format"), by_layer)
    alone = facts.get("harm_alone") or {}
    if alone:
        unit = "points" if all("points" in loss for loss in alone.values()) else "distance"
        words = {"points": "points of the metric lost", "distance": "distance of the outputs"}
        title = f"{row.name}: accuracy loss when one block alone is removed"
        yield _table(title, (words[unit],), {n: (loss[unit],) for n, loss in alone.items()})
    refit = (facts.get("refit") or {}).get("layers") or {}
    if refit:
        title = f"{row.name}: relative error of a layer's result after the cut"
        yield _table(title, ("cut", "refitted"), {n: tuple(pair) for n, pair in refit.items()})


def _table(
    title: str,
    columns: tuple[str, ...],
    figures: Mapping[str, tuple[Any, ...]],
    lowest_first: bool = False,
) -> LayerTable:
    def rank(name: str) -> float:
        value = figures[name][0]
        # What is no number comes last.
        return (value if lowest_first else -value) if isinstance(value, int | float) else 1e300

    ordered = sorted(figures, key=rank)[:MAX_SENSITIVITY_ROWS]
    numbers = [v for values in figures.values() for v in values if isinstance(v, int | float)]
    most = max(map(abs, numbers), default=0) or 1
    rows = []
    for name in ordered:
        cells = []
        for value in figures[name]:
            if isinstance(value, int | float):
                cells.append(Cell(f"{value:.4g}", abs(value) / most))
            else:
                cells.append(Cell("not measured" if value is None else str(value)))
        rows.append((name, tuple(cells)))
    others = len(figures) - len(ordered)
    left = f"{others} less sensitive layers are in report.json." if others else ""
    return LayerTable(title, columns, tuple(rows), left)


def latency_spreads(rows: Sequence[StageRow]) -> dict[str, Any] | None:
    """Compute box strips of latencies and speedups, one for each row; None without distributions.

    `calls` are x positions of the 5, 25, 50, 75 and 95 % quantiles by row number; `blocks` an SVG
    path with a tick for the speedup of each block of calls, and positions of their median and its
    interval; `calls_ticks` and `blocks_ticks` the positions and texts of both axes; `equal` the
    position of an equal speed, None where it lies beyond the axis.
    """
    measured = {row.number: row.measured for row in rows if row.measured}
    times = {n: m.latency_ms.ventiles for n, m in measured.items() if not m.latency_ms.reason}
    times = {number: ventiles for number, ventiles in times.items() if len(ventiles) == 19}
    ratios = {
        number: (m.speedup_blocks, m.speedup, m.speedup_interval)
        for number, m in measured.items()
        if m.speedup_blocks and m.speedup and m.speedup_interval
    }
    if not times or not ratios:
        return None
    ends = [end for ventiles in times.values() for end in (ventiles[0], ventiles[-1])]
    time = axis_for(ends, 12, STRIP_WIDTH - 12, log=True)
    ends = [end for own, _, interval in ratios.values() for end in (*own, *interval)]
    ratio = axis_for(ends, 12, STRIP_WIDTH - 12, log=True)
    # The places of these quantiles among the 19 ventiles.
    places = {"low": 0, "first": 4, "median": 9, "third": 14, "high": 18}
    return {
        "calls": {
            number: {name: time.position(ventiles[i]) for name, i in places.items()}
            for number, ventiles in times.items()
        },
        "blocks": {
            number: {
                "dots": "".join(f"M{ratio.position(one):g} 3v18" for one in own),
                "low": ratio.position(low),
                "median": ratio.position(median),
                "high": ratio.position(high),
            }
            for number, (own, median, (low, high)) in ratios.items()
        },
        "calls_ticks": [(time.position(v), f"{v:g}") for v in time.ticks(3)],
        "blocks_ticks": [(ratio.position(v), f"{v:g}×") for v in ratio.ticks(3)],
        "equal": ratio.position(1) if ratio.low <= 1 <= ratio.high else None,
    }


@dataclass(frozen=True)
class Training:
    """One stage's training."""

    name: str
    epochs: int
    kept: int
    loss: tuple[float | None, float | None]
    """Of the first and of the last epoch."""
    metric: float | None
    """On val, of the kept epoch."""
    plots: tuple[Plot, ...] = ()

    @property
    def thinned(self) -> int:
        """Interval between the epochs that the plot shows."""
        return -(-(self.epochs + 1) // MAX_DRAWN_POINTS)


def trainings_of(rows: Sequence[StageRow], metric: str) -> list[Training]:
    """Return each training; the first ones with plots."""
    found: list[Training] = []
    for row in rows:
        facts: dict[str, Any] = dict(row.report.artifact.facts) if row.report else {}
        history = facts.get("history")
        if not isinstance(history, list) or not history:
            continue
        kept = facts.get("kept_epoch", 0)
        trained = [epoch for epoch in history if epoch["epoch"] > 0]  # 0 is before the training
        losses = [_finite(epoch.get("loss")) for epoch in trained] or [None]
        plots = []
        if len(found) < MAX_DRAWN_TRAININGS:
            for key, words in (("loss", "training loss"), ("metric", f"{metric} on val")):
                values = [(epoch["epoch"], epoch.get(key)) for epoch in history]
                title, names = f"{row.name}: {words} by epoch", ("epoch", words)
                plots.append(line_plot(values, title=title, names=names, kept=kept))
        metric_kept = next((e.get("metric") for e in history if e["epoch"] == kept), None)
        found.append(
            Training(
                name=row.name,
                epochs=len(trained),
                kept=kept,
                loss=(losses[0], losses[-1]),
                metric=_finite(metric_kept),
                plots=tuple(filter(None, plots)),
            )
        )
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class ProofLink(NamedTuple):
    """An artifact, its input's digest if known, and whether its manifest on disk still agrees."""

    row: StageRow
    read: str
    check: str
    """Manifest on disk against the report: `agrees`, `differs` or `not here`."""


def source_hashes(report: Report) -> dict[str, str]:
    """Return the hashes that identify the imported model and the data; unknown ones are missing."""
    lock: Any = report.lock
    parts = lock.get("source") or {}
    names = {"checkpoint": "checkpoint, SHA-256", "code": "code, SHA-256", "library": "library"}
    hashes = {names[key]: str(parts[key]) for key in names if parts.get(key)}
    if parts and not parts.get("checkpoint"):
        hashes["checkpoint"] = "none: the weights are the factory's own, from the seed"
    digest = (lock.get("artifacts") or {}).get("source")
    if digest:
        hashes["artifact, digest"] = digest
    if lock.get("data"):
        hashes["data, fingerprint"] = lock["data"]
    return hashes


def proof_chain(report: Report, rows: Sequence[StageRow], out: Path | None) -> list[ProofLink]:
    """Compare each artifact's manifest on disk (digest, file hash, input) with the report."""
    lock: Any = report.lock
    digests = dict(lock.get("artifacts") or {})
    digests |= {row.name: row.report.artifact.digest for row in rows if row.report}
    links = []
    for row in rows:
        if row.report is None:
            continue
        artifact, read, check = row.report.artifact, digests.get(row.input), "not here"
        with suppress(ArtifactInvalid):
            if out is not None:
                found = Artifact.read_manifest(out / artifact.path)
                file, lineage = found.manifest.files.get(artifact.file), found.manifest.lineage
                made_from = lineage and lineage[-1].inputs.get("input")
                here = (found.digest, file and file.sha256, made_from)
                agrees = here == (artifact.digest, artifact.sha256, read)
                check = "agrees" if agrees else "differs"
        links.append(ProofLink(row, read or "", check))
    return links


def lineage_paths(rows: Sequence[StageRow], ends: Sequence[StageRow]) -> list[list[str]]:
    """Return the stage names from the source to each of some artifacts."""
    inputs = {row.name: row.input for row in rows if row.report}
    paths = []
    for end in ends:
        path = [end.name]
        while path[0] in inputs:
            path.insert(0, inputs[path[0]])
        paths.append(path)
    return paths
