"""Writes the pipelines of the front's models, and runs those that meet all limits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import write_atomically
from compress.common.errors import CompressError
from compress.pipelines.api import Pipeline
from compress.pipelines.auto.candidate_evaluator import STORE
from compress.pipelines.auto.candidates import after_stages, last_stage
from compress.pipelines.auto.front import Front, missed_limits
from compress.pipelines.config.auto_settings import LatencyLimit
from compress.pipelines.config.relative_paths import relocated
from compress.pipelines.system import yaml_core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.pipelines.auto.candidate_evaluator import Judge
    from compress.pipelines.auto.candidates import CheckedModel

POINTS = "points"
"""In the results' folder: a folder for each point, by its number."""
FILE = "pipeline.yaml"
FLOAT_FILE = "float_onnx"
"""Stage that writes the float ONNX file, with which another machine measures a point in turn."""
PREDICTED_WITHIN = 1.1
"""Measured over predicted latency, at most, where there is no limit of the median."""


def folder_of(front: Front, name: str) -> str:
    """Return the folder of a point, relative to that of the results."""
    return f"{POINTS}/{front.points.index(name) + 1}"


def chosen_points(front: Front, count: int) -> list[str]:
    """Return the points that get a folder: the best, others within the limits, then the rest.

    Of more than there may be, some are taken evenly over the front.
    """
    known = front.by_name
    chosen = [front.best] if front.best is not None else []
    others = [name for name in front.points if name != front.best]
    good = [name for name in others if not missed_limits(front.limits, known[name])]
    for names in (good, [name for name in others if name not in good]):
        chosen += _evenly(names, count - len(chosen))
    return [name for name in front.points if name in chosen]


def write_points(front: Front, judge: Judge, passed: str | None) -> Front:
    """Write the pipelines of points, and run those within the limits; return the front.

    Args:
        front: the models that were found.
        judge: the float model, and settings.
        passed: a point that was run already.
    """
    known = front.by_name
    names = chosen_points(front, judge.settings.points)
    folders = {name: folder_of(front, name) for name in names}
    for folder in (judge.out / POINTS).glob("*"):
        if f"{POINTS}/{folder.name}" not in folders.values():  # of an earlier search
            shutil.rmtree(folder)
    for name in names:
        write_point(front, judge, known[name])
        if name != passed and not missed_limits(front.limits, known[name]):
            run_point(front, judge, known[name])
    return front.model_copy(update={"folders": folders})


def write_point(front: Front, judge: Judge, model: CheckedModel) -> None:
    """Write the pipeline file that makes a point and judges it by the limits, without a search."""
    file = judge.out / folder_of(front, model.name) / FILE
    content = relocated(_content(judge, model), judge.base.folder, file.parent)
    text = yaml_core.dump(content)
    if file.exists() and file.read_text(encoding="utf-8") != text:  # of an earlier search
        shutil.rmtree(file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def run_point(front: Front, judge: Judge, model: CheckedModel) -> bool:
    """Run a point's pipeline, except for what the search has made; return whether it passed.

    That of a point whose latency is predicted is for the machine that it is predicted for.
    """
    if judge.tables is not None:
        return True
    folder = judge.out / folder_of(front, model.name)
    pipeline = Pipeline.model_validate(_content(judge, model))
    # The search's store names the files that user code reads relative to that file.
    pipeline._source, pipeline._written = judge.base._source, folder / FILE
    quiet = replace(
        judge.options,
        cache=judge.out / STORE,
        test=False,
        measured="last",
        announce=lambda line: None,
    )
    try:
        pipeline.run(folder, quiet)
    except CompressError as error:
        judge.options.announce(f"warning: {folder_of(front, model.name)}: {error}")
        return False
    return True


def _content(judge: Judge, model: CheckedModel) -> dict[str, Any]:
    """Return the content of a point's pipeline, with paths relative to the search's own file."""
    base, settings = judge.base, judge.settings
    content = model.candidate.content(base, settings)
    *before, export = content["stages"]
    gates = _gates(judge, model)
    if any(gate.get("against") == FLOAT_FILE for gate in gates):
        last = before[-1].get("name", before[-1]["stage"]) if before else "source"
        before.append({"name": FLOAT_FILE, "stage": "export_onnx", "input": last_stage(base)})
        export = {**export, "input": last}
    if gates:
        export = {**export, "gates": gates}
    return {**content, "stages": [*before, export, *after_stages(settings)]}


def _gates(judge: Judge, model: CheckedModel) -> list[dict[str, Any]]:
    """Return the gates that judge a point by the limits."""
    limits, batch = judge.settings.limits, judge.batch
    latency = limits.latency or LatencyLimit.model_construct()
    p50_ms, p95_ms = latency.p50_ms, latency.p95_ms
    if p50_ms is None and judge.tables is not None:
        p50_ms = PREDICTED_WITHIN * model.latency_ms
    gates: list[dict[str, Any]] = []
    if limits.max_drop is not None:
        against = last_stage(judge.base)
        gates.append({"gate": "max_drop", "against": against, "points": limits.max_drop})
    if limits.size is not None:
        gates.append({"gate": "max_file_size", "mebibytes": limits.size / 2**20})
    if limits.memory is not None:
        gates.append({"gate": "max_memory", "mebibytes": limits.memory / 2**20, "batch": batch})
    if p95_ms is not None:
        gates.append({"gate": "max_latency", "p95_ms": p95_ms, "batch": batch})
    if p50_ms is not None:
        # As a speedup over the float file, with which latencies are measured in turn.
        ratio = float(f"{judge.base_ms / p50_ms:.4g}")
        speedup = {"gate": "min_speedup", "ratio": ratio, "batch": batch, "against": FLOAT_FILE}
        gates.append(speedup)
    return gates


def _evenly(names: Sequence[str], count: int) -> list[str]:
    """Return some names, the first and the last among them where there may be two."""
    if count >= len(names):
        return [*names]
    step = (len(names) - 1) / max(1, count - 1)
    return [names[round(number * step)] for number in range(max(0, count))]
