"""What the page says of layers: bytes of their weights, and what stages measured of each."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.results.schema import readable_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipelines.reporting.stage_rows import Row

LARGEST_LAYERS, WORST_LAYERS = 15, 12
"""Named in a table."""
COLUMNS, TABLES = 6, 6
"""Stages that are shown side by side, and tables of what stages measured."""


@dataclass(frozen=True)
class Cell:
    """A figure, and how long its bar is."""

    text: str
    share: float = 0.0


@dataclass(frozen=True)
class LayerTable:
    """Figures by layer."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    left_out: str = ""
    """What is not in it, in words."""


def sizes_of(rows: Sequence[Row], out: Path | None) -> LayerTable | None:
    """Return the bytes of weights by layer, of stages whose format tells them; None without any.

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
    told = [(" = ".join(names[key]), layers) for key, layers in found.items() if layers]
    if not told:
        return None
    shown = told[:COLUMNS]
    heaviest: dict[str, int] = {}
    for _, layers in shown:
        heaviest |= {n: max(size, heaviest.get(n, 0)) for n, size in layers.items()}
    largest = set(sorted(heaviest, key=lambda n: -heaviest[n])[:LARGEST_LAYERS])
    ordered = [name for name in heaviest if name in largest]
    most = max(heaviest.values()) or 1
    table = [(name, tuple(_size(of.get(name), most) for _, of in shown)) for name in ordered]
    others = len(heaviest) - len(ordered)
    if others:
        sums = [sum(size for n, size in of.items() if n not in largest) for _, of in shown]
        table.append((f"{others} smaller layers", tuple(Cell(readable_bytes(s)) for s in sums)))
    sums = [sum(of.values()) for _, of in shown]
    table.append(("all layers", tuple(Cell(readable_bytes(s)) for s in sums)))
    left = ", ".join(name for name, _ in told[COLUMNS:])
    return LayerTable(
        "Bytes of weights and buffers by layer",
        tuple(name for name, _ in shown),
        tuple(table),
        f"Not shown side by side: {left}." if left else "",
    )


def _size(size: int | None, most: int) -> Cell:
    return Cell("gone") if size is None else Cell(readable_bytes(size), size / most)


def _bytes_by_layer(file: Path) -> dict[str, int]:
    """Return the bytes of a safetensors file by module, from its header; none if it is not here."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header: dict[str, Any] = json.loads(opened.read(length))
    except (OSError, struct.error, ValueError):
        return {}
    found: dict[str, int] = {}
    for tensor, told in header.items():
        if tensor != "__metadata__":
            start, end = told["data_offsets"]
            layer = tensor.rpartition(".")[0] or tensor
            found[layer] = found.get(layer, 0) + end - start
    return found


def sensitivities_of(rows: Sequence[Row]) -> tuple[list[LayerTable], list[str]]:
    """Return what stages measured of layers, and the names of stages for which is no room."""
    found = [(row.name, table) for row in rows if row.report for table in _measured(row)]
    left = list(dict.fromkeys(name for name, _ in found[TABLES:]))
    return [table for _, table in found[:TABLES]], left


def _measured(row: Row) -> Iterator[LayerTable]:
    """Yield what a stage wrote down of layers, the most sensitive first."""
    assert row.report
    facts: Mapping[str, Any] = row.report.artifact.facts
    layers = (facts.get("fidelity") or {}).get("layers") or []
    if layers:
        own = {x["module"]: (x["own_sqnr_db"], x["sqnr_db"]) for x in layers}
        title = f"{row.name}: SQNR in dB where a layer is quantized (lower is more sensitive)"
        yield _table(title, ("it alone", "with all before it"), own, lowest_first=True)
    layers = (facts.get("mixed") or {}).get("layers") or []
    if layers:
        told = {x["module"]: (x["sensitivity"], x["format"]) for x in layers}
        title = f"{row.name}: sensitivity of each layer, and the format it was given"
        yield _table(title, ("sensitivity as the stage's settings ask", "format"), told)
    harms = facts.get("harm_alone") or {}
    if harms:
        unit = "points" if all("points" in harm for harm in harms.values()) else "distance"
        words = {"points": "points of the metric lost", "distance": "distance of the outputs"}
        title = f"{row.name}: harm of removing one block alone"
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
        return (value if lowest_first else -value) if isinstance(value, int | float) else 1e300

    ordered = sorted(figures, key=rank)[:WORST_LAYERS]
    numbers = [v for values in figures.values() for v in values if isinstance(v, int | float)]
    most = max(map(abs, numbers), default=0) or 1
    rows = [(name, tuple(_figure(value, most) for value in figures[name])) for name in ordered]
    others = len(figures) - len(ordered)
    left = f"{others} less sensitive layers are in report.json." if others else ""
    return LayerTable(title, columns, tuple(rows), left)


def _figure(value: Any, most: float) -> Cell:
    if isinstance(value, int | float):
        return Cell(f"{value:.4g}", abs(value) / most)
    return Cell("not measured" if value is None else str(value))
