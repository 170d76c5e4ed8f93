"""Tables by layer for the page: bytes of weights, and the sensitivities that stages measured."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.pipelines.results.schema import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from compress.pipelines.reporting.stage_rows import StageRow

LARGEST_LAYERS, WORST_LAYERS = 15, 12
"""Rows of the size table and of each sensitivity table."""
COLUMNS, TABLES = 6, 6
"""Most stages in the size table, and most sensitivity tables on the page."""


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
    """Compare the bytes of weights by layer of eager (safetensors) artifacts; None without any.

    Stages with the same weights share a column.
    """
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
    shown = columns[:COLUMNS]
    heaviest: dict[str, int] = {}
    for _, layers in shown:
        heaviest |= {n: max(size, heaviest.get(n, 0)) for n, size in layers.items()}
    largest = set(sorted(heaviest, key=lambda n: -heaviest[n])[:LARGEST_LAYERS])
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
    left = ", ".join(name for name, _ in columns[COLUMNS:])
    return LayerTable(
        "Bytes of weights and buffers by layer",
        tuple(name for name, _ in shown),
        tuple(table),
        f"Not shown side by side: {left}." if left else "",
    )


def _bytes_by_layer(file: Path) -> dict[str, int]:
    """Read the bytes of each module from a safetensors header; {} if the file cannot be read."""
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
    left = list(dict.fromkeys(name for name, _ in found[TABLES:]))
    return [table for _, table in found[:TABLES]], left


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
    harms = facts.get("harm_alone") or {}
    if harms:
        unit = "points" if all("points" in harm for harm in harms.values()) else "distance"
        words = {"points": "points of the metric lost", "distance": "distance of the outputs"}
        title = f"{row.name}: accuracy loss when one block alone is removed"
        yield _table(title, (words[unit],), {n: (harm[unit],) for n, harm in harms.items()})
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

    ordered = sorted(figures, key=rank)[:WORST_LAYERS]
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
