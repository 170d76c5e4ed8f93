"""The search of `compress auto`: predict, solve, check by a real run, correct, and again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from export.latency.kernel_table import TABLES, KernelTable
from pipelines.auto.candidates import Candidate, CheckedModel, candidate_of, rungs
from pipelines.auto.cost_models import float_layers
from pipelines.auto.cost_models.latency_models import (
    DeeperModels,
    FormatModel,
    build_format_models,
)
from pipelines.auto.depths import ORDER_SHARE, Depth, depths_to_try
from pipelines.auto.front import Front, missed_limits
from pipelines.auto.judge import Judge
from pipelines.auto.latency_targets import ROOM, latency_targets
from pipelines.auto.recovery import Recovery
from pipelines.auto.solver import Limit, Programme
from pipelines.system.machine_info import machine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipelines.auto.cost_models.tables import LatencyTables
    from pipelines.auto.recovery import ModelKey, Programmes
    from pipelines.config.auto_settings import AutoSettings
    from pipelines.config.pipeline import PipelineConfig
    from pipelines.config.run_options import RunOptions

POINTS = "points"
"""In the results' folder: the pipelines of the front."""
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
    deadline = time.monotonic() + settings.time
    judge = Judge.from_pipeline(pipeline, settings, out, options)
    if tables is not None:
        judge.tables, judge.base_ms = tables, tables.base_ms
    return Search(judge, settings, out).run(deadline)


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
    depths: list[Depth] = field(default_factory=list)
    """Those whose widths are decided, the model's own first."""

    def run(self, deadline: float) -> Front:
        """Search until a deadline, or until nothing is left to try; return the front.

        The deadline is on the clock of :func:`time.monotonic`.
        """
        earlier = Front.read(self.out)
        if earlier is not None and earlier.conditions == self.judge.conditions:
            self.checked = {model.name: model for model in earlier.checked}
            self.judge.base_ms = earlier.base_ms
        self._warn_of_few_samples()
        self.check_whole(deadline)
        if time.monotonic() < deadline:
            whole = Depth.of_model(self.judge, self.judge.model, ())
            if self.judge.tables is not None:
                self.judge.tables.refuse_other_model(whole.space.grid, self.judge.batch)
            shallower: list[tuple[str, ...]] = []
            if self.settings.space.blocks:
                until = time.monotonic() + ORDER_SHARE * self.settings.time
                shallower = depths_to_try(self.judge, min(deadline, until))
            if self._is_feasible(whole) or self._is_feasible_without(shallower, deadline):
                self.measure_kernels(whole, deadline)
                self.depths.append(whole)
                self._check_cut(shallower, deadline)
        return self._finish()

    def _warn_of_few_samples(self) -> None:
        """Warn where `max_drop` is less than what one sample of half of `val` is worth."""
        half, most = self.judge.decided_on, self.settings.limits.max_drop
        points = half.points_of_sample
        if most and most < points:
            self.judge.options.announce(
                f"warning: half of val has {half.samples} samples, and one of them is worth "
                f"{points:.3g} points, more than max_drop {most:g}: no sample may be lost"
            )

    def check_whole(self, deadline: float, removed_blocks: tuple[str, ...] = ()) -> None:
        """Check a model of whole widths in each format and runtime, the float ONNX file first."""
        self.check(Candidate("float"))
        for runtime, format in product(self.settings.space.runtimes, self.settings.space.formats):
            if time.monotonic() < deadline:
                self.check(Candidate(format, runtime=runtime, removed_blocks=removed_blocks))

    def _check_cut(self, shallower: Sequence[tuple[str, ...]], deadline: float) -> None:
        """Check smaller models, first as they are after a refit, then trained.

        Args:
            shallower: blocks that may be removed together, each time with the ones before.
            deadline: on the clock of :func:`time.monotonic`.
        """
        begin, recovery = deadline - self.settings.time, self.settings.space.recovery
        untrained_share = UNTRAINED_SHARE * (1 + bool(shallower)) if recovery else 1.0
        until, is_left = begin + untrained_share * self.settings.time, True
        for share in (FIRST_SHARE, min(HARMS_SHARE, untrained_share)):
            if share != FIRST_SHARE:
                now = time.monotonic()
                self._add_depths(shallower, now + DEPTHS_SHARE * (until - now))
            measured_until = begin + share * self.settings.time
            if len(self.depths) > 1:  # each with cuts of its own
                now = time.monotonic()
                measured_until = max(measured_until, now + DEPTHS_SHARE * (until - now))
            programmes = self._measure_harms(min(deadline, measured_until))
            if self.models and time.monotonic() < until:
                is_left = self._check_next(programmes)
        while self.models and is_left and time.monotonic() < until:
            is_left = self._check_next(programmes)
        while self.models and recovery is not None and time.monotonic() < deadline:
            if not Recovery(self, programmes, rungs(recovery.epochs)).train_next(deadline):
                break

    def _add_depths(self, shallower: Sequence[tuple[str, ...]], deadline: float) -> None:
        """Prepare widths without some blocks, and without more of them, where that may do."""
        for removed_blocks in shallower:
            if time.monotonic() > deadline:
                break
            self.check_whole(deadline, removed_blocks)
            whole = self._whole_without(removed_blocks)
            # Where fewer channels lose even more, unless training returns it.
            limits, recovery = self.settings.limits, self.settings.space.recovery
            is_kept = any("max_drop" not in missed_limits(limits, model) for model in whole)
            if not whole or not (is_kept or recovery):
                continue
            pruned = self.judge.pruned_model(whole[0].candidate)
            depth = Depth.of_model(self.judge, pruned, removed_blocks)
            self.measure_kernels(depth, deadline)
            self.depths.append(depth)

    def _measure_harms(self, deadline: float) -> Programmes:
        """Measure what single cuts lose at each depth, in equal shares of the time until then."""
        programmes: dict[tuple[str, ...], Programme] = {}
        for done, depth in enumerate(self.depths):
            now = time.monotonic()
            until = now + (deadline - now) / (len(self.depths) - done)
            deeper = programmes[()].harm if programmes else None
            harms = depth.measure_harms(self.judge, until, deeper)
            programmes[depth.removed_blocks] = Programme(depth.space.grid, harms)
        return programmes

    def _whole_without(self, removed_blocks: tuple[str, ...]) -> list[CheckedModel]:
        """Return the checked models without some blocks that are as wide as before, untrained."""
        return [
            model
            for model in self.offered()
            if model.removed_blocks == removed_blocks
            and not (model.widths or model.float_layers or model.trained)
        ]

    def _is_feasible_without(self, shallower: Sequence[tuple[str, ...]], deadline: float) -> bool:
        """Return whether the smallest model without most blocks meets latency and size."""
        if not shallower:
            return False
        self.check_whole(deadline, shallower[-1])
        whole = self._whole_without(shallower[-1])
        if not whole:
            return False
        pruned = self.judge.pruned_model(whole[0].candidate)
        return self._is_feasible(Depth.of_model(self.judge, pruned, shallower[-1]))

    def _is_feasible(self, depth: Depth) -> bool:
        """Check the smallest model as each whole one; return whether one meets latency and size."""
        if self.settings.limits.latency is None and self.settings.limits.size is None:
            return True
        whole = self._whole_without(depth.removed_blocks)
        for model in sorted(whole, key=lambda model: model.latency_ms):
            candidate = candidate_of(
                *(model.format, depth.smallest, depth.space.whole, model.runtime),
                depth.removed_blocks,
            )
            self.check(candidate)
            found = self.checked.get(candidate.name)
            if found is None or not missed_limits(self.settings.limits, found, but="max_drop"):
                return True
        return False

    def measure_kernels(self, depth: Depth, deadline: float | None = None) -> None:
        """Measure kernels over the grid of widths, in each format and runtime.

        Without a deadline, on the clock of :func:`time.monotonic`, or without some blocks, no layer
        is left in float.
        """
        judge, space, removed_blocks = self.judge, depth.space, depth.removed_blocks
        table = KernelTable(self.out / TABLES, machine(), judge.context.threads)
        for format in self.settings.space.formats:
            whole = {
                m.runtime: m for m in self._whole_without(removed_blocks) if m.format == format
            }
            if not whole:
                continue
            until = time.monotonic() + float_layers.SHARE * self.settings.time
            layers, is_mixed = None, deadline is not None and not removed_blocks
            if deadline is not None and is_mixed and judge.tables is None and "onnx" in whole:
                until = min(deadline, until)
                layers = float_layers.measure_layer_harms(judge, whole["onnx"], until)
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
                        *(table, judge.measure_latency_ms, layers, until),
                        deeper,
                    )
            except StageFailed as error:  # the other formats may do
                self.judge.options.announce(f"warning: {format} is not cut: {error}")
                continue
            for model in built:
                model.harm = whole[model.runtime].loss - model.layers.total_harm
                model.removed_blocks = removed_blocks
                self.models[format, model.runtime, removed_blocks] = model
        for checked in self.checked.values():
            if checked.removed_blocks == removed_blocks:
                self._correct(checked)

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
                candidate, predicted_ms = found
                self.check(candidate, predicted_ms)
                if candidate.name in self.checked:
                    self._correct(self.checked[candidate.name])
                return True
        return False

    def _correct(self, checked: CheckedModel) -> None:
        """Take a measured latency into account in the model of its format, runtime and blocks."""
        model = self.models.get((checked.format, checked.runtime, checked.removed_blocks))
        choice = None if model is None else model.choice_of(checked.candidate)
        if model is not None and choice is not None:
            model.correct(model.latency_ms(choice), checked.latency_ms)

    @property
    def asked_ms(self) -> float | None:
        """The limit of latency, for predictions; None where there is none."""
        return self.settings.limits.latency

    def smallest_ms(self) -> float:
        """Return the smallest latency that the models predict."""
        return min(model.corrected()(model.smallest) for model in self.models.values())

    def solve(
        self, programmes: Programmes, latency_ms: float | None, known: Sequence[Candidate]
    ) -> tuple[Candidate, float] | None:
        """Return the model that loses least below a latency, if it has one, besides known ones."""
        best: tuple[float, Candidate, float] | None = None
        for (format, runtime, removed_blocks), model in self.models.items():
            corrected = model.corrected()
            limits = [] if latency_ms is None else [Limit(corrected, ROOM * latency_ms)]
            if self.settings.limits.size is not None:
                limits.append(Limit(model.bytes, self.settings.limits.size))
            same = (c for c in known if (c.format, c.runtime) == (format, runtime))
            choices = map(model.choice_of, same)
            mixed = programmes[removed_blocks].extended(model.layers.grid, model.layers.harm)
            choice = mixed.solve(limits, [tried for tried in choices if tried is not None])
            if choice is None:
                continue
            harm = mixed.total_harm(choice) + model.harm
            if best is None or harm < best[0]:
                best = harm, model.candidate(choice), corrected(choice)
        return None if best is None else best[1:]

    def check(self, candidate: Candidate, predicted_ms: float | None = None) -> None:
        """Check a candidate, unless that was done, and write the front."""
        if candidate.name in self.checked or candidate in self.failed:
            return
        try:
            found = self.judge.check(candidate, predicted_ms)
        except StageFailed as error:
            is_whole = not candidate.is_smaller and not candidate.float_layers
            if is_whole and candidate.runtime == "onnx":
                raise
            if not candidate.is_smaller:
                self.judge.options.announce(f"warning: {candidate.name} is left out: {error}")
            self.failed[candidate] = str(error)
            self.judge.options.announce(f"warning: {candidate.name} could not be made: {error}")
            return
        self.checked[candidate.name] = found
        self.judge.options.announce(Front.line(found))
        self._front().write(self.out)

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

    def _front(self) -> Front:
        return Front(
            limits=self.settings.limits,
            checked=tuple(self.checked.values()),
            failed={candidate.name: why for candidate, why in self.failed.items()},
            points=tuple(model.name for model in Front.pareto(self.offered())),
            conditions=self.judge.conditions,
            base_ms=self.judge.base_ms,
            predicted_for=self.judge.tables.where if self.judge.tables else None,
        )

    def _finish(self) -> Front:
        """Confirm the models that meet all limits, the best first, and write their pipelines."""
        limits = self.settings.limits
        wanted = [model for model in self.offered() if not missed_limits(limits, model)]
        by_loss = self.loss_decides
        wanted.sort(key=lambda m: m.loss_order if by_loss else (m.latency_ms, m.drop or 0.0))
        most, best = self.settings.limits.max_drop, None
        for model in wanted:
            confirmed = self.judge.confirm(model)
            self.checked[model.name] = confirmed
            drop = confirmed.confirmed_drop
            if drop is not None and (most is None or drop <= most):
                best = confirmed
                break
        front = self._front().model_copy(update={"best": best.name if best else None})
        for number, name in enumerate(front.points, 1):
            file = self.out / POINTS / str(number) / "pipeline.yaml"
            model = self.checked[name]
            gate = self.judge.speedup_gate(model)
            model.candidate.write_pipeline(self.judge.base, self.settings, file, gate)
        front.write(self.out)
        return front
