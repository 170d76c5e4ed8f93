"""The search of `compress auto`: predict, solve, check by a real run, correct, and again."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from compress.common.errors import StageFailed
from compress.export.latency.kernels import TABLES, KernelTable
from compress.pipelines.auto import search_events
from compress.pipelines.auto.candidate_evaluator import Judge
from compress.pipelines.auto.candidates import Candidate, CheckedModel, rungs
from compress.pipelines.auto.cost_models import float_layers
from compress.pipelines.auto.cost_models.latency_models import (
    DeeperModels,
    FormatModel,
    WholeModels,
    build_format_models,
)
from compress.pipelines.auto.front import (
    Front,
    missed_limits,
    run_point,
    shares_of_limits,
    write_point,
    write_points,
)
from compress.pipelines.auto.search import search_log
from compress.pipelines.auto.strategy.block_variants import Depth, Depths, whole_models_of
from compress.pipelines.auto.strategy.recovery import FILE as HALVINGS
from compress.pipelines.auto.strategy.recovery import Recovery, Solution, latency_targets
from compress.pipelines.config.auto_settings import LatencyLimit
from compress.pipelines.system.jsonl_log import RunEvent, event_listener
from compress.pipelines.system.machine_info import machine
from compress.profiling.peak_memory import measurement_process
from compress.pruning.latency.solver import Limit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from compress.pipelines.auto.cost_models.float_layers import LayerHarms
    from compress.pipelines.auto.cost_models.tables import LatencyTables
    from compress.pipelines.auto.strategy.recovery import ModelKey, Programmes
    from compress.pipelines.config.auto_settings import AutoSettings, Format, Runtime
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.config.run_options import RunOptions
    from compress.pipelines.system.jsonl_log import EventListener

WHOLE_MODELS = "whole_models.json"
"""In the results' folder: models that latencies are fitted to."""
FIRST_SHARE, HARMS_SHARE = 0.1, 0.35
"""Shares of the time after which what single cuts lose is taken as it is known: early, for a first
model, and once more."""
DEPTHS_SHARE = 0.5
"""Share of the time that is left after a first model, until training, for models without some
blocks; of what is left then, the same share is for what single cuts lose there."""
UNTRAINED_SHARE = 0.25
"""Share of the time after which models are trained, where `recovery` says so; what single cuts lose
matters less then. Twice as much where blocks may be removed."""


def search(
    pipeline: PipelineConfig,
    settings: AutoSettings,
    out: Path,
    options: RunOptions,
    tables: LatencyTables | None = None,
) -> Front:
    """Look for the models that lose least under limits, until the time is over.

    Args:
        pipeline: what is made once, and data and metric.
        settings: limits, time and what is decided.
        out: folder of the results; a search that was stopped goes on where it was.
        options: who is notified.
        tables: latencies of another machine, which are taken instead of measuring any here.

    Raises:
        PipelineInvalid: the pipeline has stages that the search itself adds, or no data, or the
            tables are of another model or of other calls.
        StageFailed: the model cannot be traced, exported or judged, or the machine is too busy.
        Unavailable: a runtime is not installed.
    """
    if tables is not None:
        tables.refuse_other_settings(settings, pipeline.threads)
    start = time.monotonic()
    # Of all candidates in one process, which imports the libraries once.
    with search_log(out), measurement_process():
        listener = event_listener(options.announce)
        listener(search_events.search_started(pipeline, settings))
        judge = Judge.from_pipeline(pipeline, settings, out, options)
        if tables is not None:
            judge.tables, judge.base_ms = tables, tables.base_ms
        front = Search(judge, settings, out, emit=listener).run(start + settings.time)
        listener(search_events.search_finished(front, time.monotonic() - start))
    return front


@dataclass
class Search:
    """One search, and what it has found so far."""

    judge: Judge
    settings: AutoSettings
    out: Path
    checked: dict[str, CheckedModel] = field(default_factory=dict)
    """By name, in the order in which they were checked."""
    failed: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that could not be built → why."""
    models: dict[ModelKey, FormatModel] = field(default_factory=dict)
    """By format, runtime and removed blocks."""
    is_infeasible: bool = False
    """Whether even the smallest models miss limits."""
    not_searched: list[str] = field(default_factory=list)
    """What is left out, and why."""
    emit: EventListener = lambda event: None
    """Receives the events."""

    def run(self, deadline: float) -> Front:
        """Search until a deadline, or until nothing is left to try; return the front.

        The deadline is on the clock of :func:`time.monotonic`.
        """
        earlier = Front.read(self.out)
        if earlier is not None and earlier.conditions == self.judge.conditions:
            # Figures of earlier versions, or of other limits, may lack what is needed now.
            self.checked = {
                model.name: model
                for model in earlier.checked
                if math.inf not in shares_of_limits(self.settings.limits, model).values()
            }
            self.judge.base_ms = earlier.base_ms
        half, most = self.judge.decided_on, self.settings.limits.max_drop
        points = half.points_of_sample  # of less than one sample, `max_drop` allows none
        if most and most < points:
            self._warn(
                f"half of val has {half.samples} samples, and one of them is worth "
                f"{points:.3g} points, more than max_drop {most:g}: no sample may be lost"
            )
        self.check_whole(deadline)
        if time.monotonic() < deadline:
            whole = Depth.of_model(self.judge, self.judge.model, ())
            if self.judge.tables is not None:
                self.judge.tables.refuse_other_model(whole.space.grid, self.judge.batch)
            depths = Depths(self, whole)
            if self.settings.space.blocks:
                depths.find_order(deadline)
            self.is_infeasible = not depths.are_feasible(deadline)
            if not self.is_infeasible:
                self.measure_kernels(whole, deadline)
                self._check_cut(depths, deadline)
        return self._finish()

    def check_whole(self, deadline: float, removed_blocks: tuple[str, ...] = ()) -> None:
        """Check a model of whole widths in each format and runtime, the float ONNX file first."""
        self.check(Candidate("float"))
        for runtime, format in product(self.settings.space.runtimes, self.settings.space.formats):
            if time.monotonic() < deadline:
                self.check(Candidate(format, runtime=runtime, removed_blocks=removed_blocks))

    def _check_cut(self, depths: Depths, deadline: float) -> None:
        """Check smaller models, first as they are after a refit, then trained."""
        begin, recovery = deadline - self.settings.time, self.settings.space.recovery
        untrained_share = UNTRAINED_SHARE * (1 + bool(depths.shallower)) if recovery else 1.0
        until, is_left = begin + untrained_share * self.settings.time, True
        for share in (FIRST_SHARE, min(HARMS_SHARE, untrained_share)):
            if share != FIRST_SHARE:
                now = time.monotonic()
                depths.add(now + DEPTHS_SHARE * (until - now))
            measured_until = begin + share * self.settings.time
            if len(depths.added) > 1:  # each with cuts of its own
                now = time.monotonic()
                measured_until = max(measured_until, now + DEPTHS_SHARE * (until - now))
            programmes = depths.programmes(min(deadline, measured_until))
            if self.models and time.monotonic() < until:
                is_left = self._check_next(programmes)
        while self.models and is_left and time.monotonic() < until:
            is_left = self._check_next(programmes)
        if self.models and recovery is not None:
            ends, key = rungs(recovery.epochs), self.judge.conditions
            key += self.settings.limits.model_dump_json()
            Recovery(self, programmes, ends, self.out / HALVINGS, key).train(deadline)

    def measure_kernels(self, depth: Depth, deadline: float | None = None) -> None:
        """Measure kernels over the grid of widths, in each format and runtime.

        Without a deadline, on the clock of :func:`time.monotonic`, or without some blocks, no layer
        is left in float.
        """
        judge, space, removed_blocks = self.judge, depth.space, depth.removed_blocks
        table = KernelTable(self.out / TABLES, machine(), judge.context.threads)
        # Relative to that of the float file, which is measured once.
        key = f"{judge.conditions} {judge.base_ms!r}"
        fitted = None if removed_blocks else WholeModels.read(self.out / WHOLE_MODELS, key)
        for format in self.settings.space.formats:
            same = (m for m in whole_models_of(self.offered(), depth) if m.format == format)
            # ONNX Runtime first, whose file those with layers in float are made from.
            whole = {m.runtime: m for m in sorted(same, key=lambda m: m.runtime != "onnx")}
            if not whole:
                continue
            until = time.monotonic() + float_layers.SHARE * self.settings.time
            layers = None
            if deadline is not None and not removed_blocks:
                until = min(deadline, until)
                layers = self._measure_layer_harms(next(iter(whole.values())), until)
            if not space.grid and layers is None:
                continue
            try:
                if judge.tables is not None:
                    built = judge.tables.format_models(format, [*whole])
                else:
                    known = {r: m for r in whole if (m := self.models.get((format, r, ())))}
                    deeper = DeeperModels(known, depth.names_before) if removed_blocks else None
                    settings = self.settings.without_blocks(removed_blocks)
                    built = build_format_models(
                        *(format, [*whole], space.grid, depth.model, judge.context, settings),
                        *(table, judge.measure_latency_ms, layers, until, deeper, fitted),
                    )
            except StageFailed as error:  # the other formats may do
                self._leave_out(f"{format} is not cut: {error}")
                continue
            if layers is not None and built[0].layers.unsuitable:
                self._leave_out(
                    f"no layer of {format} is left in float: {built[0].layers.unsuitable}"
                )
            for model in built:
                model.harm = whole[model.runtime].loss - model.layers.total_harm
                model.removed_blocks = removed_blocks
                self.models[format, model.runtime, removed_blocks] = model
        for checked in self.checked.values():
            if checked.removed_blocks == removed_blocks:
                self._correct(checked)

    def _measure_layer_harms(self, whole: CheckedModel, deadline: float) -> LayerHarms | None:
        """Measure what quantizing single layers loses; None where none may stay in float."""
        judge = self.judge
        if whole.format == "float" or not self.settings.space.float_layers:
            return None
        try:
            if judge.tables is not None:
                raise StageFailed("the latency tables have no such layers")
            # The ONNX file, from which those with layers in float are made, is no point by itself.
            self.check(Candidate(whole.format))
            return float_layers.measure_layer_harms(judge, whole, deadline)
        except StageFailed as error:
            self._leave_out(f"no layer of {whole.format} is left in float: {error}")
            return None

    def _leave_out(self, what: str) -> None:
        """Warn that something is not searched, and remember it for the front."""
        if what not in self.not_searched:
            self.not_searched.append(what)
            self._warn(what)

    def _warn(self, message: str) -> None:
        line = f"warning: {message}"
        self.emit(RunEvent("message", None, line, level="warning"))

    def _check_next(self, programmes: Programmes) -> bool:
        """Check the next model, and correct the prediction; return whether there was one."""
        offered = self.offered()
        targets: list[float | None] = [
            *latency_targets(offered, self.is_good, self.asked_ms, self.smallest_ms())
        ]
        if not any(map(self.is_good, offered)):
            # A format that loses too much as a whole may do with some layers in float.
            targets.append(None)
        for target_ms in targets:
            known = [*(model.candidate for model in self.checked.values()), *self.failed]
            found = self.solve(programmes, target_ms, known)
            if found is not None:
                self.check(found.candidate, found.predicted_ms)
                return True
        return False

    def _correct(self, checked: CheckedModel) -> None:
        """Take a measured latency into account in the model of its format, runtime and blocks."""
        model = self.models.get((checked.format, checked.runtime, checked.removed_blocks))
        choice = None if model is None else model.choice_of(checked.candidate)
        if model is not None and choice is not None:
            uncorrected_ms = model.latency_ms(choice)
            model.correct(uncorrected_ms, checked.latency_ms)
            self.emit(search_events.model_corrected(checked, uncorrected_ms, model.correction))

    @property
    def asked_ms(self) -> float | None:
        """The median latency that keeps to the limits; None without any of latency."""
        limit = self.settings.limits.latency or LatencyLimit.model_construct()
        asked = list[float]()
        models = self.offered()
        for most, figures in (
            (limit.p50_ms, [m.surely_ms for m in models]),
            (limit.p95_ms, [m.p95_ms for m in models]),
        ):
            pairs = zip(figures, models, strict=True)
            ratios = [figure / m.latency_ms for figure, m in pairs if figure is not None]
            if most is not None:
                asked.append(most / (median(ratios) if ratios else 1.0))
        return min(asked, default=None)

    def _most_bytes(self, format: Format, runtime: Runtime) -> float | None:
        """Return the largest file within the limits of size and memory; None without these.

        Memory is a straight line through what the checked models of a format and runtime take.
        """
        limits = self.settings.limits
        same = [m for m in self.offered() if (m.format, m.runtime) == (format, runtime)]
        taken = {m.bytes: m.peak_mebibytes for m in same if m.peak_mebibytes is not None}
        most = [] if limits.size is None else [limits.size]
        if limits.memory is not None and len(taken) > 1:
            slope, constant = np.polyfit([*taken], [*taken.values()], 1).tolist()
            allowed = limits.memory / 2**20
            if slope > 0:
                within = [size for size, peak in taken.items() if peak <= allowed]
                most.append(max([(allowed - constant) / slope, *within]))
        return min(most, default=None)

    def smallest_ms(self) -> float:
        """Return the smallest latency that the models predict."""
        return min(model.corrected()(model.smallest) for model in self.models.values())

    def solve(
        self, programmes: Programmes, latency_ms: float | None, known: Sequence[Candidate]
    ) -> Solution | None:
        """Return the model that loses least within a latency, besides known ones.

        The latency is a predicted one. Returns None where there is no such model.
        """
        best: Solution | None = None
        for (format, runtime, removed_blocks), model in self.models.items():
            corrected = model.corrected()
            limits = [] if latency_ms is None else [Limit(corrected, latency_ms)]
            most_bytes = self._most_bytes(format, runtime)
            if most_bytes is not None:
                limits.append(Limit(model.bytes, most_bytes))
            same = (c for c in known if (c.format, c.runtime) == (format, runtime))
            choices = map(model.choice_of, same)
            mixed = programmes[removed_blocks].extended(model.layers.grid, model.layers.harm)
            choice = mixed.solve(limits, [tried for tried in choices if tried is not None])
            if choice is None:
                continue
            loss = mixed.total_loss_increase(choice) + model.harm
            if best is None or loss < best.predicted_loss:
                best = Solution(model.candidate(choice), corrected(choice), loss)
        return best

    def check(self, candidate: Candidate, predicted_ms: float | None = None) -> None:
        """Check a candidate, unless that was done, and write the front."""
        if candidate.name in self.checked or candidate in self.failed:
            return
        self.emit(search_events.candidate_chosen(candidate, predicted_ms))
        try:
            found = self.judge.check(candidate, predicted_ms)
        except StageFailed as error:
            is_whole = not candidate.is_smaller and not candidate.float_layers
            if is_whole and candidate.runtime == "onnx":
                raise
            self.failed[candidate] = str(error)
            self.emit(search_events.candidate_failed(candidate, str(error)))
            return
        before = self._front().points
        self.checked[candidate.name] = found
        self.emit(search_events.candidate_checked(found, self.settings.limits))
        front = self._front()
        if front.points != before:
            self.emit(search_events.front_changed(front.points))
        front.write(self.out)
        self._correct(found)

    def offered(self) -> list[CheckedModel]:
        """Return the checked models of the formats, runtimes and depths that are asked for."""
        space = self.settings.space
        return [
            model
            for model in self.checked.values()
            if model.format in space.formats
            and model.runtime in space.runtimes
            and (space.blocks or not model.removed_blocks)
        ]

    @property
    def loss_decides(self) -> bool:
        """Whether the best model is the one that loses least, and not the fastest."""
        limits = self.settings.limits
        return limits.latency is not None or limits.max_drop is None

    def is_good(self, model: CheckedModel) -> bool:
        """Whether a model meets all limits but that of latency."""
        return not missed_limits(self.settings.limits, model, but="latency")

    def _front(self, best: str | None = None) -> Front:
        points = Front.pareto(self.offered())
        if best is not None and best not in {model.name for model in points}:
            points = sorted([*points, self.checked[best]], key=lambda model: model.latency_ms)
        return Front(
            limits=self.settings.limits,
            checked=tuple(self.checked.values()),
            failed={candidate.name: why for candidate, why in self.failed.items()},
            points=tuple(model.name for model in points),
            conditions=self.judge.conditions,
            base_ms=self.judge.base_ms,
            predicted_for=self.judge.tables.where if self.judge.tables else None,
            best=best,
            is_infeasible=self.is_infeasible,
            not_searched=tuple(self.not_searched),
        )

    def _finish(self) -> Front:
        """Confirm the models that meet all limits, the best first, and write the front's points."""
        limits = self.settings.limits
        wanted = [model for model in self.offered() if not missed_limits(limits, model)]
        by_loss = self.loss_decides
        wanted.sort(key=lambda m: m.loss_order if by_loss else (m.latency_ms, m.drop or 0.0))
        best = next((model.name for model in wanted if self._passes(model)), None)
        front = write_points(self._front(best), self.judge, best)
        front.write(self.out)
        return front

    def _passes(self, model: CheckedModel) -> bool:
        """Confirm a model, and run its pipeline; return whether it keeps to all limits."""
        confirmed = self.judge.confirm(model)
        self.checked[model.name] = confirmed
        if confirmed.confirmed_drop is None or missed_limits(self.settings.limits, confirmed):
            return False
        front = self._front(best=model.name)
        front.write(self.out)
        write_point(front, self.judge, confirmed)
        return run_point(front, self.judge, confirmed)
