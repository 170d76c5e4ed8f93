"""Makes every model of a space, and writes what the comparison reads."""

from __future__ import annotations

import json
import time
from itertools import product
from typing import TYPE_CHECKING

from auto_search import latencies, losses
from auto_search.spaces import Built
from compress.pipelines.auto.cost_models import QUANTIZED
from compress.pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from pathlib import Path

    from auto_search.spaces import Space


def build(space: Space, work: Path, part: str = "", seconds: str = "inf") -> None:
    """Go on with a part, `losses` or `latencies`, or all; write the file of the space."""
    deadline = time.monotonic() + float(seconds)
    work.mkdir(parents=True, exist_ok=True)
    built = Built(space, work)
    if part in ("", "files"):
        prepare(built)
    if part in ("", "losses"):
        losses.measure_losses(built)
    is_measured = True
    if part in ("", "latencies"):
        is_measured = latencies.measure_models(built, deadline)
        is_measured = is_measured and latencies.measure_points(built, deadline)
    if is_measured:
        print(f"{space.name}: {_written(built)}")


def prepare(built: Built) -> None:
    """Train, and export what others are resized from."""
    latencies.whole_file(built)
    latencies.prepare_layers(built)
    for name in built.models:
        for format in built.space.formats:
            latencies.prepare_files(built, name, format)


def _written(built: Built) -> str:
    """Write the file of a space once its latencies are there; say how far it is."""
    folder = built.work / "losses"
    grids = {name: space.grid for name, space in built.widths.items()}
    every = [(n, widths) for n, grid in grids.items() for widths in product(*grid.values())]
    files = [losses.loss_file(folder, n, widths) for n, widths in every]
    known_losses = {
        point: json.loads(file.read_text())
        for point, file in zip(every, files, strict=True)
        if file.exists()
    }
    known_ms = latencies.known_latencies(built)
    points = [*latencies.points(built)]
    state = (
        f"losses of {len(known_losses)} of {len(every)} widths, latencies of {len(known_ms)} of "
        f"{len(points)} models"
    )
    if len(known_ms) < len(points):
        return state
    models = []
    for name, grid in grids.items():
        for format in built.space.formats:
            found = latencies.read_model(built, name, format)
            own = [point for point in points if point[:2] == (name, format)]
            model = {
                "name": name,
                "format": format,
                "grid": grid,
                "layers": [] if format == "float" else built.space.float_layers,
                "base_ms": found.latency_ms.base,
                "terms": [
                    [scope, values, change]
                    for scope, changes in found.latency_ms.terms.items()
                    for values, change in changes.items()
                ],
                "latency_ms": [known_ms[point] for point in own],
            }
            if len(known_losses) == len(every):
                by_widths = {widths: own for (n, widths), own in known_losses.items() if n == name}
                judged = [
                    by_widths[widths][format][built.layer_choices(format).index(patterns)]
                    for _, _, widths, patterns in own
                ]
                layers = zip(found.layers.names, found.layers.loss_increase.values(), strict=True)
                model |= {
                    "harms": _loss_increases(grid, by_widths),
                    "layer_harms": {
                        layer: loss_increase[QUANTIZED] for layer, loss_increase in layers
                    },
                    "cross_entropy": [cross_entropy for cross_entropy, _ in judged],
                    "distance": [distance for _, distance in judged],
                }
            models.append(model)
    content = {"machine": machine(), "models": models}
    built.space.file.write_text(json.dumps(_rounded(content)) + "\n")
    return f"{state}: {built.space.file.name}"


def _loss_increases(grid, known) -> list:
    """Return group, width, and what cutting that group alone loses, as a search measures it."""
    whole = tuple(widths[0] for widths in grid.values())
    ((_, base),) = known[whole]["float"]
    rows = []
    for place, (group, widths) in enumerate(grid.items()):
        for width in widths:
            ((_, distance),) = known[*whole[:place], width, *whole[place + 1 :]]["float"]
            rows.append([group, width, max(0.0, distance - base)])
    return rows


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
