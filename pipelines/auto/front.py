"""The models that a search found: which no other one beats, their table, page and pipelines."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.atomic_files import write_atomically
from compress.common.config import Result
from compress.common.errors import CompressError, GateRefused
from compress.common.printable import ShownInNotebooks
from compress.common.sealed_json import read_if_unchanged, write_sealed
from compress.core.gates.gate import gate_class
from compress.pipelines.api import Pipeline
from compress.pipelines.auto.candidates import (
    CANDIDATES,
    STORE,
    Candidate,
    CheckedModel,
    after_stages,
    last_stage,
)
from compress.pipelines.config.auto_settings import AutoLimits, LatencyLimit
from compress.pipelines.config.pipeline import relocated
from compress.pipelines.reporting.notebook import NotebookView, view_of
from compress.pipelines.reporting.svg_plots import Plot, Point, scatter_plot
from compress.pipelines.system import yaml_core
from compress.pipelines.system.error_context import raise_unless_of_the_model
from compress.pipelines.system.templates import render_template

if TYPE_CHECKING:
    from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
    from compress.pipelines.results.schema import Report

FRONT_FILE = "front.json"
FRONT_PAGE = "front.html"
FLOAT_WHOLE = Candidate("float").name
POINTS_FOLDER = "points"  # in the results' folder: a folder for each point, by its number
PIPELINE_FILE = "pipeline.yaml"
FLOAT_EXPORT = "float_onnx"
"""Stage that writes the float ONNX file, with which a point is measured in turn."""
MOST_RUNS = 2  # of a point that gates on time or memory refuse
PREDICTED_WITHIN = 1.1
"""Measured over predicted latency, at most, where there is no limit of the median."""


def missed_limits(limits: AutoLimits, model: CheckedModel, but: str = "") -> tuple[str, ...]:
    """Return the limits that a model misses or has no figure for, without `but`."""
    lost = max(model.drop or 0.0, model.confirmed_drop or 0.0)
    is_lost = model.drop is None or (limits.max_drop is not None and lost > limits.max_drop)
    missed = ["max_drop"] if is_lost else []
    missed += [name for name, share in shares_of_limits(limits, model).items() if share > 1]
    return tuple(name for name in missed if name != but)


def shares_of_limits(limits: AutoLimits, model: CheckedModel) -> dict[str, float]:
    """Return what a model takes of each limit of cost; infinity where it was not measured."""
    latency = limits.latency or LatencyLimit.model_construct()
    peak = None if model.peak_mebibytes is None else 2**20 * model.peak_mebibytes
    figures = [
        ("latency", model.surely_ms, latency.p50_ms),
        ("latency", model.p95_ms, latency.p95_ms),
        ("size", model.bytes, limits.size),
        ("memory", peak, limits.memory),
    ]
    shares: dict[str, float] = {}
    for name, value, most in figures:
        if most is not None:
            share = math.inf if value is None else value / most
            shares[name] = max(share, shares.get(name, 0.0))
    return shares


class Refusal(NamedTuple):
    """That the run of a point did not pass."""

    reason: str
    may_pass: bool
    """Whether it may pass later, as gates on time or memory alone refused."""


class Front(ShownInNotebooks, Result):
    """All models that were checked, and the best of them."""

    limits: AutoLimits
    checked: tuple[CheckedModel, ...]
    """In the order in which they were checked."""
    failed: dict[str, str] = {}
    """Name of a candidate that could not be built → why."""
    refused: dict[str, str] = {}
    """Name of a model whose run as a point did not pass, though it met the limits → why."""
    may_pass: tuple[str, ...] = ()
    """Those of them that may pass once this machine has less to do."""
    points: tuple[str, ...]
    """Names of the models that no other one beats in latency, drop and size, the fastest first.
    Then of those that are beaten and were run: what was refused, and the best."""
    folders: dict[str, str] = {}
    """Name of a point → its folder below that of the results, with the pipeline that makes it."""
    is_infeasible: bool = False
    """Whether even the smallest models miss limits, so that nothing was searched."""
    not_searched: tuple[str, ...] = ()
    """What was left out of the search, and why."""
    time_limit: float = 0.0
    """Seconds that were given; 0 in fronts of older versions."""
    spent: dict[str, float] = {}
    """Part of the search → seconds that it took."""
    conditions: str
    """Hash of the model and of what figures depend on besides; a search with the same goes on."""
    base_ms: float
    """Median time of a call of the float ONNX file, with which others were measured in turn."""
    predicted_for: str | None = None
    """The machine whose latency tables all latencies follow from; None where they were measured."""
    best: str | None = None
    """The model that meets all limits, confirmed on samples that did not decide; None without."""
    samples: int | None = None
    """Samples of each half of `val`; None in fronts of older versions."""

    @property
    def by_name(self) -> dict[str, CheckedModel]:
        """The checked models by name."""
        return {model.name: model for model in self.checked}

    @property
    def time_taken(self) -> str:
        """How long the search took, and where that time went; empty if that is not known."""
        parts = sorted(self.spent.items(), key=lambda part: -part[1])
        each = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in parts if seconds >= 1)
        total = sum(self.spent.values())
        taken = f"{total:.0f} s of the {self.time_limit:g} s given" if self.spent else ""
        return f"{taken}: {each}" if each else taken

    @staticmethod
    def pareto(models: Sequence[CheckedModel]) -> list[CheckedModel]:
        """Return the models that no other one beats in latency, drop and size."""

        def figures(model: CheckedModel) -> tuple[float, float, float]:
            drop = math.inf if model.drop is None else model.drop
            return model.latency_ms, drop, model.bytes

        known = {figures(model) for model in models}
        unbeaten = {
            own
            for own in known
            if not any(o != own and all(a <= b for a, b in zip(o, own, strict=True)) for o in known)
        }
        return sorted((m for m in models if figures(m) in unbeaten), key=lambda m: m.latency_ms)

    @staticmethod
    def line(model: CheckedModel, limits: AutoLimits | None = None) -> str:
        """Describe a checked model in a line, with figures for the limits that there are."""
        drop = "no finite metric" if model.drop is None else f"drop {model.drop:.3g} points"
        removed = len(model.removed_blocks)
        cut = f", {removed} block{'s' if removed > 1 else ''} removed" if removed else ""
        cut += f", {len(model.widths)} groups cut" if model.widths else ""
        cut += f", {len(model.float_layers)} layers in float" if model.float_layers else ""
        trained = f", trained for {model.trained} epochs" if model.trained else ""
        is_beside = model.predicted_ms is not None and not model.is_predicted
        predicted = f" (predicted {model.predicted_ms:.3g})" if is_beside else ""
        size = f"{model.bytes / 1e6:.3g} MB"
        if limits is not None and limits.latency is not None and limits.latency.p95_ms is not None:
            predicted += f", p95 {_text(model.p95_ms, 'unknown')} ms"
        if limits is not None and limits.memory is not None:
            size += f", {_text(model.peak_mebibytes, 'unknown')} MiB of memory"
        kind = model.format if model.runtime == "onnx" else f"{model.format} in {model.runtime}"
        return f"{kind}{cut}{trained}: {model.latency}{predicted}, {size}, {drop}"

    @classmethod
    def read(cls, out: Path) -> Front | None:
        """Read `front.json` back; None where there is none, or it was changed."""
        return read_if_unchanged(out / FRONT_FILE, cls)

    def write(self, out: Path) -> None:
        """Write `front.json` into the results' folder."""
        write_sealed(out / FRONT_FILE, self)


def _text(value: float | None, unknown: str = "") -> str:
    return unknown if value is None else f"{value:.3g}"


def cells_of(front: Front, model: CheckedModel) -> dict[str, str]:
    """Return a model's figures as text, by the name of their column."""
    limits = front.limits
    confirmed = _text(model.confirmed_drop)
    if model.confirmed_between is not None:
        low, high = model.confirmed_between
        confirmed += f" ({low:.2g} to {high:.2g})"
    is_tail_limited = limits.latency is not None and limits.latency.p95_ms is not None
    return {
        "model": model.name,
        "blocks removed": str(len(model.removed_blocks)),
        "groups cut": str(len(model.widths)),
        "float layers": str(len(model.float_layers)),
        "ms": "" if model.is_predicted else _text(model.latency_ms),
        "predicted": _text(model.latency_ms if model.is_predicted else model.predicted_ms),
        **({"p95 ms": _text(model.p95_ms)} if is_tail_limited else {}),
        "MB": _text(model.bytes / 1e6),
        **({"MiB memory": _text(model.peak_mebibytes)} if limits.memory is not None else {}),
        "drop": _text(model.drop),
        "confirmed": confirmed,
        "misses": ", ".join(missed_limits(limits, model)),
    }


def lines_below(front: Front, out: Path) -> Iterator[str]:
    """Yield what was found, and where it is."""
    if front.best is not None:
        yield f"best: {front.line(front.by_name[front.best], front.limits)}"
        folder = front.folders.get(front.best) if front.predicted_for is None else None
        run = out / folder if folder else out / CANDIDATES / front.best
        yield f"its run: {run}"
        served = run / "artifacts" / front.by_name[front.best].candidate.export
        yield f"serve it: compress serve {shlex.quote(str(served))}"
    else:
        passed = " and passed its run" if front.refused else ""
        yield f"no model that was checked meets all limits{passed}"
    for name in front.may_pass:
        if name in front.folders:
            point = out / front.folders[name]
            command = ["compress", "run", str(point / PIPELINE_FILE), "--out", str(point)]
            yield f"run again, once this machine has less to do: {shlex.join(command)}"
    if front.predicted_for is not None:
        yield f"latencies are predicted for {front.predicted_for}; run the points' pipelines there"
    for what in front.not_searched:
        yield f"left out: {what}"
    if front.time_taken:
        yield f"time: {front.time_taken}"
    yield f"page: {out / FRONT_PAGE}; figures: {out / FRONT_FILE}; pipelines: {out / POINTS_FOLDER}"


def nothing_found(front: Front) -> str:
    """Say what comes nearest to the limits, and what would help."""
    limits = front.limits

    def distance(model: CheckedModel) -> tuple[float, float]:
        return max(shares_of_limits(limits, model).values(), default=0.0), model.latency_ms

    if front.is_infeasible:
        nearest = min(front.checked, key=distance)
        missed = missed_limits(limits, nearest, but="max_drop")
        return (
            f"no model can be within {limits.described}: the nearest is "
            f"{front.line(nearest, limits)}; allow more {' and '.join(missed)}"
        )
    kept = [
        model
        for model in front.checked
        if model.drop is not None and (limits.max_drop is None or model.drop <= limits.max_drop)
    ]
    if not kept and limits.max_drop is None:
        return "no model that was checked has a finite metric, not even the float one"
    if not kept:
        return (
            f"no model keeps the metric within {limits.max_drop:g} points, not even the float one; "
            "allow more"
        )
    nearest = min(kept, key=distance)
    missed = missed_limits(limits, nearest)
    if (refusal := front.refused.get(nearest.name)) is not None:
        return (
            f"no model within {limits.described} was found whose run passed; the nearest is "
            f"{front.line(nearest, limits)}; {refusal}"
        )
    confirmed = ""
    if "max_drop" in missed:
        confirmed = f", and {nearest.confirmed_drop:.3g} points on samples not decided by"
    wanted = f"more {' and '.join(missed)}" if missed else "more"
    return (
        f"no model within {limits.described} was found and confirmed; the nearest is "
        f"{front.line(nearest, limits)}{confirmed}; allow {wanted}, or more --time"
    )


def _front_plot(front: Front) -> Plot | None:
    models = [model for model in front.checked if model.drop is not None]
    numbers = {name: str(number) for number, name in enumerate(front.points, 1)}
    points = [
        Point(
            label=numbers.get(model.name, ""),
            title=front.line(model, front.limits),
            x=model.latency_ms,
            y=model.drop or 0.0,
            x_interval=(model.latency_ms, model.surely_ms),
            refused=bool(missed_limits(front.limits, model)),
            y_interval=model.confirmed_between,
        )
        for model in models
    ]
    if not points:
        return None
    predicted = "predicted " if front.predicted_for else ""
    return scatter_plot(
        points,
        {i for i, model in enumerate(models) if model.name in front.points},
        title="Drop of the metric against latency",
        names=(f"{predicted}ms a call", "drop, in points; lower is better"),
        shown="{:g}".format,
        counted=f"n = {front.samples}" if front.samples else "",
    )


@view_of.register
def _(front: Front) -> NotebookView:
    known = front.by_name
    cells = [cells_of(front, known[name]) for name in front.points]
    predicted = front.predicted_for and f"; latencies are predicted for {front.predicted_for}"
    best = front.best and f"best: {front.line(known[front.best], front.limits)}"
    return NotebookView(
        title="models that no other one beats; * the best within all limits" + (predicted or ""),
        lines=[best or nothing_found(front)],
        columns=("point", *(cells[0] if cells else ())),
        rows=[
            [f"{n} *" if own["model"] == front.best else str(n), *own.values()]
            for n, own in enumerate(cells, 1)
        ],
        plot=_front_plot(front),
        status="passed" if front.best else "refused",
    )


def front_page(front: Front) -> str:
    """Render the page: what was found, a plot of drop against latency, and all figures."""
    known, compared = front.by_name, ""
    best, whole = known.get(front.best or ""), known.get(FLOAT_WHOLE)
    if best is not None and whole is not None and best is not whole:
        compared = (
            f"The float ONNX file takes {front.base_ms / best.latency_ms:.3g} times as long, and "
            f"{whole.bytes / best.bytes:.3g} times as many bytes."
        )
    return render_template(
        "front.html.jinja",
        front=front,
        known=known,
        best=best,
        compared=compared,
        plot=_front_plot(front),
        shares=lambda model: ", ".join(
            f"{100 * share:.0f} % of {name}" if share < 2 else f"{share:.3g} times the {name}"
            for name, share in shares_of_limits(front.limits, model).items()
        ),
        cells_of=cells_of,
        nothing_found=nothing_found,
    )


def folder_of(front: Front, name: str) -> str:
    """Return the folder of a point, relative to that of the results."""
    return f"{POINTS_FOLDER}/{front.points.index(name) + 1}"


def chosen_points(front: Front, count: int) -> list[str]:
    """Return the points that get a folder: the best, others within the limits, the rest, evenly."""
    known = front.by_name
    chosen = [front.best] if front.best is not None else []
    others = [name for name in front.points if name != front.best]
    good = [name for name in others if not missed_limits(front.limits, known[name])]
    for names in (good, [name for name in others if name not in good]):
        places = max(0, count - len(chosen))
        step = (len(names) - 1) / max(1, places - 1)
        chosen += names if places >= len(names) else [names[round(n * step)] for n in range(places)]
    return [name for name in front.points if name in chosen]


def write_points(
    front: Front, evaluator: CandidateEvaluator, passed: str | None, deadline: float
) -> Front:
    """Write the points' pipelines; run those within the limits but one that `passed` already.

    None is run any more after a deadline of :func:`time.monotonic`.
    """
    known, left_out = front.by_name, [*front.not_searched]
    refused, may_pass = {**front.refused}, [*front.may_pass]
    names = chosen_points(front, evaluator.settings.points)
    folders = {name: folder_of(front, name) for name in names}
    for folder in (evaluator.out / POINTS_FOLDER).glob("*"):
        if f"{POINTS_FOLDER}/{folder.name}" not in folders.values():  # of an earlier search
            shutil.rmtree(folder)
    for name in names:
        write_point(front, evaluator, known[name])
        if name == passed or name in refused or missed_limits(front.limits, known[name]):
            continue
        if time.monotonic() < deadline:
            if refusal := run_point(front, evaluator, known[name]):
                refused[name] = refusal.reason
                may_pass += [name] if refusal.may_pass else []
        else:
            file = evaluator.out / folders[name] / PIPELINE_FILE
            left_out.append(f"the run of a point, for want of time: compress run {file}")
    changes = {"folders": folders, "not_searched": tuple(left_out)}
    return front.model_copy(update={**changes, "refused": refused, "may_pass": tuple(may_pass)})


def write_point(front: Front, evaluator: CandidateEvaluator, model: CheckedModel) -> None:
    """Write the pipeline that makes a point and checks it against the limits, without a search."""
    file = evaluator.out / folder_of(front, model.name) / PIPELINE_FILE
    content = relocated(_content(evaluator, model), evaluator.base.folder, file.parent)
    text = yaml_core.dump(content)
    if file.exists() and file.read_text(encoding="utf-8") != text:  # of an earlier search
        shutil.rmtree(file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def run_point(front: Front, evaluator: CandidateEvaluator, model: CheckedModel) -> Refusal | None:
    """Run a point's pipeline, except for what the search has made; return why it did not pass.

    Where gates on time or memory alone refuse, on a machine that is busy for a moment, it is run
    once more; no such refusal is stored.
    """
    if evaluator.tables is not None:
        return None  # it is for the machine that its latency is predicted for
    folder = evaluator.out / folder_of(front, model.name)
    pipeline = Pipeline.model_validate(_content(evaluator, model))
    # The search's store names the files that user code reads relative to that file.
    pipeline._source, pipeline._written = evaluator.base._source, folder / PIPELINE_FILE
    reports: list[Report] = []
    quiet = replace(
        evaluator.options,
        cache=evaluator.out / STORE,
        test=False,
        measured="last",
        announce=lambda line: None,
        finished=reports.append,
    )
    for _ in range(MOST_RUNS):
        try:
            pipeline.run(folder, quiet)
        except CompressError as error:
            raise_unless_of_the_model(error)
            reason, is_refused = str(error), isinstance(error, GateRefused)
            if not (may_pass := is_refused and _may_pass_later(reports[-1])):
                break
        else:
            return None
    if may_pass:
        found = f"the search measured {model.latency}"
        reason += f"; {found}; it may pass once this machine has less to do"
    evaluator.options.announce(f"warning: {folder_of(front, model.name)}: {reason}")
    return Refusal(reason, may_pass)


def _may_pass_later(report: Report) -> bool:
    """Whether gates refused that measure time or memory alone, which differ from run to run."""
    verdicts = [verdict for stage in report.stages for verdict in stage.verdicts]
    return all(
        verdict.passed
        or (gate_class(verdict.gate).may_vary and (verdict.value is not None or verdict.was_busy))
        for verdict in verdicts
    )


def _content(evaluator: CandidateEvaluator, model: CheckedModel) -> dict[str, Any]:
    """Return the content of a point's pipeline, with paths relative to the search's own file."""
    base, settings = evaluator.base, evaluator.settings
    content = model.candidate.content(base, settings)
    *before, export = content["stages"]
    limits, batch = settings.limits, evaluator.batch
    latency = limits.latency or LatencyLimit.model_construct()
    p50_ms, p95_ms = latency.p50_ms, latency.p95_ms
    if p50_ms is None and evaluator.tables is not None:
        p50_ms = float(f"{PREDICTED_WITHIN * model.latency_ms:.4g}")
    gates: list[dict[str, Any]] = []
    if limits.max_drop is not None:
        gates.append({"gate": "max_drop", "against": last_stage(base), "points": limits.max_drop})
    if limits.size is not None:
        gates.append({"gate": "max_file_size", "mebibytes": limits.size / 2**20})
    if limits.memory is not None:
        gates.append({"gate": "max_memory", "mebibytes": limits.memory / 2**20, "batch": batch})
    if p50_ms is not None or p95_ms is not None:
        # In turn with the float file, as the search measures: beside another model, whose weights
        # take the caches, the same file takes longer.
        measured: dict[str, Any] = {"batch": batch, "against": FLOAT_EXPORT}
        for figure, most in (("p50_ms", p50_ms), ("p95_ms", p95_ms)):
            if most is not None:
                gates.append({"gate": "max_latency", figure: most, **measured})
        last = before[-1].get("name", before[-1]["stage"]) if before else "source"
        before.append({"name": FLOAT_EXPORT, "stage": "export_onnx", "input": last_stage(base)})
        export = {**export, "input": last}
    if gates:
        export = {**export, "gates": gates}
    return {**content, "stages": [*before, export, *after_stages(settings)]}
