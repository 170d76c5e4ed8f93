"""What a search has found so far, and how it measures, predicts, solves and checks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from compress.artifacts.recipe import KeepBlocks
from compress.common.errors import StageFailed
from compress.common.sealed_json import read_state, write_state
from compress.export.latency.kernels import TABLES, KernelTable
from compress.pipelines.auto.candidates import Candidate, CheckedModel
from compress.pipelines.auto.cost_models import (
    DeeperModels,
    FormatModel,
    WholeModels,
    build_format_models,
)
from compress.pipelines.auto.deadline import OutOfTime, progress_until
from compress.pipelines.auto.front import Front, Refusal, missed_limits
from compress.pipelines.config.auto_settings import Format, LatencyLimit, Runtime
from compress.pipelines.system.error_context import raise_unless_of_the_model
from compress.pipelines.system.jsonl_log import EventEmitter
from compress.pipelines.system.machine_info import machine
from compress.profiling.benchmark import NotMeasurable
from compress.pruning.latency.solver import Limit, Programme
from compress.pruning.latency.widths import WidthSpace, measure_loss_increases
from compress.pruning.recovery.recovery import name_before

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
    from compress.pipelines.auto.cost_models import LayerSensitivity
    from compress.pruning.latency.widths import LossIncreases

    ModelKey = tuple[Format, Runtime, tuple[str, ...]]
    """Format, runtime and removed blocks."""
    Programmes = Mapping[tuple[str, ...], Programme]
    """Removed blocks → the widths to choose without them."""

FLOAT_LAYERS_SHARE = 0.15
"""Share of the search's time for the layers of one format that may stay in float."""


class Solution(NamedTuple):
    """What the solver found."""

    candidate: Candidate
    predicted_ms: float
    predicted_loss: float


@dataclass(frozen=True)
class BlockVariant:
    """A model without some blocks, and the widths that it may have."""

    removed_blocks: tuple[str, ...]
    model: EagerModel
    space: WidthSpace

    @classmethod
    def from_model(
        cls,
        evaluator: CandidateEvaluator,
        model: EagerModel,
        removed_blocks: tuple[str, ...] = (),
        deadline: float = math.inf,
    ) -> Self:
        """Lay a grid of widths for a model that lacks some blocks; OutOfTime after a deadline."""
        context = evaluator.context
        context = replace(context, progress=progress_until(deadline, context.progress))
        widths = evaluator.settings.without_blocks(removed_blocks).space.widths
        if widths is None:
            return cls(removed_blocks, model, WidthSpace.empty(context.device))
        context.progress("channels", 0, 1, "ranked, and their smallest widths verified")
        grid = WidthSpace.from_model(model, context, widths.selection, widths.values)
        context.progress("channels", 1, 1)
        return cls(removed_blocks, model, grid)

    @property
    def names_before(self) -> dict[str, str]:
        """Names that groups have in the model with all blocks."""
        removal = self.model.recipe.edits[-1] if self.removed_blocks else None
        kept = removal.kept if isinstance(removal, KeepBlocks) else {}
        return {group: name_before(group, kept) for group in self.space.grid}

    def measure_loss_increases(
        self,
        evaluator: CandidateEvaluator,
        deadline: float,
        deeper: Mapping[str, Mapping[int, float]] | None = None,
    ) -> LossIncreases:
        """Measure what each single cut loses beyond the blocks; what is known already is read.

        Until a width of a group is measured, `deeper` is assumed: what is lost with all blocks.
        """
        removed = len(self.removed_blocks)
        # The names and keys of earlier versions, whose searches go on.
        name = f"harms-{removed}-blocks-removed.json" if removed else "harms.json"
        file, key = evaluator.out / name, f"{self.model.digest} {evaluator.settings.space.widths}"
        known = read_state(file, key, dict[str, float]) or {}
        without_blocks = evaluator.loss_of(self.model.load()) if removed else 0.0
        return measure_loss_increases(
            self.space,
            evaluator.context.progress,
            lambda module: max(0.0, evaluator.loss_of(module) - without_blocks),
            known,
            lambda: write_state(file, key, known),
            deadline,
            {g: deeper[name] for g, name in self.names_before.items() if deeper and name in deeper},
        )


@dataclass
class SearchState:
    """What one search has found so far."""

    evaluator: CandidateEvaluator
    checked: dict[str, CheckedModel] = field(default_factory=dict)
    """By name, in the order in which they were checked."""
    failed: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that could not be built → why."""
    postponed: dict[Candidate, float | None] = field(default_factory=dict)
    """Those that a busy machine could not measure and that are tried again → their predicted_ms."""
    models: dict[ModelKey, FormatModel] = field(default_factory=dict)
    """By format, runtime and removed blocks."""
    is_infeasible: bool = False
    """Whether even the smallest models miss limits."""
    not_searched: list[str] = field(default_factory=list)
    """What is left out, and why."""
    refused: dict[str, Refusal] = field(default_factory=dict)
    """Name of a model whose run as a point did not pass → why."""
    spent: dict[str, float] = field(default_factory=dict)
    """Part of the search → the seconds that it took so far."""
    last_moment: float = math.inf
    """Until when models that were begun may be made, on the clock of :func:`time.monotonic`."""
    seconds_of_models: dict[bool, float] = field(default_factory=dict)
    """Whether channels or blocks were removed → the least that it took to make and measure one."""
    emit: EventEmitter = field(default_factory=EventEmitter)

    def __post_init__(self) -> None:
        self.settings, self.out = self.evaluator.settings, self.evaluator.out

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time that a block takes, without that of blocks within it, to a part's."""
        begin, before = time.monotonic(), sum(self.spent.values())
        try:
            yield
        finally:
            inner = sum(self.spent.values()) - before
            self.spent[part] = self.spent.get(part, 0.0) + time.monotonic() - begin - inner

    def check(
        self,
        candidate: Candidate,
        predicted_ms: float | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        """Build and measure a candidate, unless that was done, and write the front.

        One that a busy machine cannot measure is postponed, or failed where this is its last try.
        """
        name = candidate.name
        self.postponed.pop(candidate, None)
        if name in self.checked or candidate in self.failed:
            return
        fields = {"candidate": name, **candidate.settings(), "predicted_ms": predicted_ms}
        self.emit("candidate_chosen", None, f"{name}: chosen", fields, is_announced=False)
        # All others are compared with the float one.
        until = math.inf if candidate == Candidate("float") else self.last_moment
        begin = time.monotonic()
        try:
            with self.timed("models made and measured"):
                found = self.evaluator.evaluate(candidate, predicted_ms, until)
        except OutOfTime as error:  # not a failure: more time may make it
            self.leave_out(f"{name}: {error}")
            return
        except StageFailed as error:
            raise_unless_of_the_model(error)
            if isinstance(error, NotMeasurable) and not is_last:
                if candidate == Candidate("float"):
                    self.warn(f"{name}: {error}; it is tried again")
                    self.check(candidate, is_last=True)
                else:
                    self.warn(f"{name}: {error}; it is tried again later")
                    self.postponed[candidate] = predicted_ms
                return
            if candidate == Candidate("float"):
                raise
            self.failed[candidate] = str(error)
            line = f"warning: {name} could not be made: {error}"
            fields = {"candidate": name, "error": str(error)}
            self.emit("candidate_failed", None, line, fields, "warning")
            return
        least = self.seconds_of_models.get(candidate.is_smaller, math.inf)
        self.seconds_of_models[candidate.is_smaller] = min(least, time.monotonic() - begin)
        before, limits = self.front().points, self.settings.limits
        self.checked[name] = found
        fields = {
            "candidate": name,
            "figures": found.model_dump(mode="json", exclude={"name"}),
            "misses": missed_limits(limits, found),
        }
        self.emit("candidate_checked", None, Front.line(found, limits), fields)
        front = self.front()
        if front.points != before:
            line = f"{len(front.points)} models that no other one beats"
            points = {"points": [*front.points]}
            self.emit("front_changed", None, line, points, is_announced=False)
        front.write(self.out)
        self._correct(found)

    def check_postponed(self, deadline: float, *, is_last: bool = False) -> None:
        """Check what a busy machine could not measure again, until a deadline."""
        for candidate, predicted_ms in [*self.postponed.items()]:
            if time.monotonic() < deadline:
                del self.postponed[candidate]
                self.check(candidate, predicted_ms, is_last=is_last)
            elif is_last:
                why = "this machine was too busy to measure it; run again when it has less to do"
                self.leave_out(f"{candidate.name}: {why}")

    def is_time_for(self, candidate: Candidate, deadline: float) -> bool:
        """Whether a model can be made until a deadline, if that takes as long as for others."""
        seconds = self.seconds_of_models.get(candidate.is_smaller, 0.0)
        return time.monotonic() + seconds < deadline

    def check_whole(self, deadline: float, removed_blocks: tuple[str, ...] = ()) -> None:
        """Check a model of whole widths in each format and runtime, the float ONNX file first."""
        self.check(Candidate("float"))
        for runtime, format in product(self.settings.space.runtimes, self.settings.space.formats):
            candidate = Candidate(format, runtime=runtime, removed_blocks=removed_blocks)
            if time.monotonic() < deadline:
                self.check(candidate)
            elif candidate.name not in self.checked:
                self.leave_out(f"{candidate.name}: there was no more time; allow more --time")

    def offered(self) -> list[CheckedModel]:
        """Return the checked models of the formats, runtimes and blocks that are asked for."""
        space = self.settings.space
        return [
            model
            for model in self.checked.values()
            if model.format in space.formats
            and model.runtime in space.runtimes
            and (space.blocks or not model.removed_blocks)
        ]

    def whole_models(self, removed_blocks: tuple[str, ...]) -> list[CheckedModel]:
        """Return the offered models that only lack blocks: as wide as before, and not trained."""
        return [
            model
            for model in self.offered()
            if model.removed_blocks == removed_blocks
            and not (model.widths or model.float_layers or model.trained)
        ]

    def is_good(self, model: CheckedModel) -> bool:
        """Whether a model meets all limits but that of latency."""
        return not missed_limits(self.settings.limits, model, but="latency")

    @property
    def loss_decides(self) -> bool:
        """Whether the best model is the one that loses least, and not the fastest."""
        limits = self.settings.limits
        return limits.latency is not None or limits.max_drop is None

    @property
    def asked_ms(self) -> float | None:
        """The median latency that keeps to the limits; None without any of latency."""
        limit = self.settings.limits.latency or LatencyLimit.model_construct()
        asked, models = list[float](), self.offered()
        for most, figure in ((limit.p50_ms, "surely_ms"), (limit.p95_ms, "p95_ms")):
            figures = [(getattr(m, figure), m.latency_ms) for m in models]
            ratios = [value / median_ms for value, median_ms in figures if value is not None]
            if most is not None:
                asked.append(most / (median(ratios) if ratios else 1.0))
        return min(asked, default=None)

    def smallest_ms(self) -> float:
        """Return the smallest latency that the models predict."""
        return min(model.corrected()(model.smallest) for model in self.models.values())

    def solve(
        self, programmes: Programmes, latency_ms: float | None, known: Sequence[Candidate]
    ) -> Solution | None:
        """Return the model that loses least within a predicted latency, besides known ones."""
        best: Solution | None = None
        for (format, runtime, removed_blocks), model in self.models.items():
            corrected = model.corrected()
            limits = [] if latency_ms is None else [Limit(corrected, latency_ms)]
            most_bytes = self._most_bytes(format, runtime)
            if most_bytes is not None:
                limits.append(Limit(model.bytes, most_bytes))
            same = [c for c in known if (c.format, c.runtime) == (format, runtime)]
            tried = [choice for c in same if (choice := model.choice_of(c)) is not None]
            layers = model.layers
            mixed = programmes[removed_blocks].extended(layers.grid, layers.loss_increase)
            choice = mixed.solve(limits, tried)
            if choice is None:
                continue
            loss = mixed.total_loss_increase(choice) + model.loss_increase
            if best is None or loss < best.predicted_loss:
                best = Solution(model.candidate(choice), corrected(choice), loss)
        return best

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
            # A line that does not rise says nothing about how large a file may be.
            if slope > 0:
                within = [size for size, peak in taken.items() if peak <= allowed]
                most.append(max([(allowed - constant) / slope, *within]))
        return min(most, default=None)

    def measure_kernels(self, variant: BlockVariant, deadline: float | None = None) -> None:
        """Measure kernels over the grid; no layer is in float without a deadline or some blocks."""
        evaluator, removed_blocks = self.evaluator, variant.removed_blocks
        context, end = evaluator.context, math.inf if deadline is None else deadline
        table = KernelTable(self.out / TABLES, machine(), context.threads)
        # Relative to that of the float file, which is measured once.
        key = f"{evaluator.conditions} {evaluator.base_ms!r}"
        fitted = None if removed_blocks else WholeModels.read(self.out / "whole_models.json", key)
        # The fastest format first: there may be no time for all. Those that a busy machine could
        # not measure come once more after the others; until one format can be searched, as long as
        # there is time: kernels that were measured are not measured again.
        whole_models = sorted(self.whole_models(removed_blocks), key=lambda m: m.latency_ms)
        left, busy = [*dict.fromkeys(m.format for m in whole_models)], dict[Format, str]()
        for format in left:
            same = [m for m in whole_models if m.format == format]
            # ONNX Runtime first, whose file those with layers in float are made from.
            whole = {m.runtime: m for m in sorted(same, key=lambda m: m.runtime != "onnx")}
            now = time.monotonic()
            # Once one format can be searched, others leave it time for that.
            stop = now + (end - now) / 2 if self.models else end
            if now >= stop:
                why = busy.get(format, "there was no more time; allow more --time")
                self.leave_out(f"{format} is not cut: {why}")
                continue
            bounded = replace(context, progress=progress_until(stop, context.progress))
            until = now + FLOAT_LAYERS_SHARE * self.settings.time
            layers = None
            if deadline is not None and not removed_blocks:
                until = min(stop, until)
                layers = self._layer_sensitivity(next(iter(whole.values())), until)
            if not variant.space.grid and layers is None:
                continue
            try:
                if evaluator.tables is not None:
                    built = evaluator.tables.format_models(format, [*whole])
                else:
                    known = {r: m for r in whole if (m := self.models.get((format, r, ())))}
                    deeper = DeeperModels(known, variant.names_before) if removed_blocks else None
                    built = build_format_models(
                        format,
                        [*whole],
                        grid=variant.space.grid,
                        model=variant.model,
                        context=bounded,
                        settings=self.settings.without_blocks(removed_blocks),
                        table=table,
                        measure_ms=evaluator.measure_latency_ms,
                        layers=layers,
                        deadline=until,
                        deeper=deeper,
                        whole_models=fitted,
                    )
            except StageFailed as error:  # the other formats may do
                raise_unless_of_the_model(error)
                is_first, may_go_on = format not in busy, not self.models and end < math.inf
                if isinstance(error, NotMeasurable) and (is_first or may_go_on):
                    if is_first:
                        self.warn(f"{format}: {error}; it is tried again after other formats")
                    left.append(format)
                    busy[format] = str(error)
                    continue
                self.leave_out(f"{format} is not cut: {error}")
                continue
            if layers is not None and (why := built[0].layers.unsuitable):
                self.leave_out(f"no layer of {format} is left in float: {why}")
            for model in built:
                own_loss = whole[model.runtime].loss
                model.loss_increase = own_loss - model.layers.total_loss_increase
                model.removed_blocks = removed_blocks
                self.models[format, model.runtime, removed_blocks] = model
        for checked in self.checked.values():
            if checked.removed_blocks == removed_blocks:
                self._correct(checked)

    def _layer_sensitivity(self, whole: CheckedModel, deadline: float) -> LayerSensitivity | None:
        """Measure what quantizing single layers loses; None where none may stay in float."""
        if whole.format == "float" or not self.settings.space.float_layers:
            return None
        try:
            if self.evaluator.tables is not None:
                raise StageFailed("the latency tables have no such layers")
            # The ONNX file, from which those with layers in float are made, is no point by itself.
            file = Candidate(whole.format)
            self.check(file)
            # One that is postponed was made: its latency, which is not known yet, is not needed.
            if file.name not in self.checked and file not in self.postponed:
                raise StageFailed("its ONNX file was not made and measured")
            return self.evaluator.layer_sensitivity(whole, deadline)
        except StageFailed as error:
            raise_unless_of_the_model(error)
            self.leave_out(f"no layer of {whole.format} is left in float: {error}")
            return None

    def _correct(self, checked: CheckedModel) -> None:
        """Take a measured latency into account in the model of its format, runtime and blocks."""
        format, runtime = checked.format, checked.runtime
        model = self.models.get((format, runtime, checked.removed_blocks))
        choice = None if model is None else model.choice_of(checked.candidate)
        if model is not None and choice is not None:
            uncorrected_ms, measured_ms = model.latency_ms(choice), checked.latency_ms
            model.correct(uncorrected_ms, measured_ms)
            factor = model.correction
            figures = {"uncorrected_ms": uncorrected_ms, "measured_ms": measured_ms}
            about = {"candidate": checked.name, "format": format, "runtime": runtime}
            fields = {**about, **figures, "factor": factor}
            line = f"latency of {format} in {runtime}: corrected by {factor:.3g}"
            self.emit("model_corrected", None, line, fields, is_announced=False)

    def leave_out(self, what: str) -> None:
        """Warn that something is not searched, and remember it for the front."""
        if what not in self.not_searched:
            self.not_searched.append(what)
            self.warn(what)

    def warn(self, message: str) -> None:
        """Announce and log a warning."""
        self.emit("message", None, f"warning: {message}", level="warning")

    def front(self, best: str | None = None) -> Front:
        """Return the front of what was checked so far, with a model that was chosen on it."""
        points = [model.name for model in Front.pareto(self.offered())]
        # One that was refused keeps its folder, too, to be run again; and its number, by which that
        # is named, though a faster one is chosen after it.
        points = [*dict.fromkeys([*points, *self.refused, *([] if best is None else [best])])]
        evaluator = self.evaluator
        return Front(
            limits=self.settings.limits,
            checked=tuple(self.checked.values()),
            failed={candidate.name: why for candidate, why in self.failed.items()},
            refused={name: refusal.reason for name, refusal in self.refused.items()},
            may_pass=tuple(name for name, refusal in self.refused.items() if refusal.may_pass),
            points=tuple(points),
            conditions=evaluator.conditions,
            base_ms=evaluator.base_ms,
            predicted_for=evaluator.tables.where if evaluator.tables else None,
            best=best,
            samples=evaluator.decided_on.samples,
            is_infeasible=self.is_infeasible,
            not_searched=tuple(self.not_searched),
            spent=self.spent,
            time_limit=self.settings.time,
        )
